"""What tests of this room share with those of other rooms."""

from support.fixtures.rollouts import _servers, make_rollout, make_server, rollouts, rows, server

__all__ = ["_servers", "make_rollout", "make_server", "rollouts", "rows", "server"]
