"""The process that untrusted programs run in. Standard library only: it is started without site-packages.

``launch`` brings the process up behind its walls, ``supervisor`` forks one process per program, watches and kills it,
``program`` is what such a fork does: it gives up every right that is left and runs the code. ``walls`` says what
stands, with ``kernel``, ``namespaces``, ``landlock`` and ``seccomp``. No expected output ever comes here: verdicts are
made outside.
"""
