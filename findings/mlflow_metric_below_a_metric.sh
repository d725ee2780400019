#!/usr/bin/env bash
# mlflow-skinny 3.17.2: `loss` and `loss/actor` are both valid names of metrics, but a run in a folder takes only the one that comes
# first: the other fails with an OSError of the file system that names neither metric nor rule. SQLite takes both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet mlflow-skinny==3.17.2 sqlalchemy==2.0.44 alembic==1.17.2
export MLFLOW_ALLOW_FILE_STORE=true
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2>"$folder/stderr" <<'PYTHON' || { cat "$folder/stderr"; exit 1; }
import mlflow
from mlflow import MlflowClient

print("mlflow-skinny", mlflow.__version__)


def outcome(uri, names):
    """Return what logging these metrics in turn ends with."""
    client = MlflowClient(tracking_uri=uri)
    run = client.create_run(client.create_experiment("-".join(names).replace("/", "_"))).info.run_id
    try:
        for name in names:
            client.log_metric(run, name, 1.0)
    except Exception as error:
        return type(error).__name__
    return sorted(client.get_run(run).data.metrics)


outcomes = {
    (store, names): outcome(uri, names)
    for store, uri in (("folder", "file:runs"), ("sqlite", "sqlite:///runs.db"))
    for names in (("loss", "loss/actor"), ("loss/actor", "loss"))
}
for (store, names), result in outcomes.items():
    print(f"{store}: {' then '.join(names)}: {result}")
assert list(outcomes.values()) == [
    "NotADirectoryError",
    "IsADirectoryError",
    ["loss", "loss/actor"],
    ["loss", "loss/actor"],
], outcomes
PYTHON
