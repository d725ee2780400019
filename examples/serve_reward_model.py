"""Serve rewards over HTTP: ``lightppo serve-reward``, as a script; ``--help`` shows how.

Needs ``pip install lightppo[serve]``.
"""

from lightppo.cli.serve_reward import main

if __name__ == "__main__":
    main(prog="serve_reward_model.py")
