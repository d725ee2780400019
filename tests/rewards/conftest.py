"""What tests of this plugin share with those of other folders."""

from support.fixtures.rollouts import _servers, make_rollout, make_server, rollouts, rows, server

__all__ = ["_servers", "make_rollout", "make_server", "rollouts", "rows", "server"]
