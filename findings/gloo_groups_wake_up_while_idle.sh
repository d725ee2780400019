#!/usr/bin/env bash
# torch 2.13.0: each gloo process group keeps three threads, one of which wakes up about a hundred times a second though
# nothing is sent. 300 groups of one rank have 900 threads, and take about a fifth of a core while the process sleeps; with a
# group for each of many trials, ranks on a few cores spend their time on that. destroy_process_group ends the threads.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat >"$folder/groups.py" <<'PYTHON'
import os
import tempfile
import time

import torch
import torch.distributed as dist

SECONDS = 5


def threads():
    return len(os.listdir("/proc/self/task"))


def wakes():
    total = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as status:
            total += sum(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))
    return total


def idle():
    """Wake-ups and seconds of a core, per second of sleep."""
    time.sleep(1)
    woken, used = wakes(), time.process_time()
    time.sleep(SECONDS)
    return round((wakes() - woken) / SECONDS), round((time.process_time() - used) / SECONDS, 3)


print("torch", torch.__version__)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
alone = threads()
print(f"  one group: {alone} threads, {idle()[0]} wake-ups a second")
groups = [dist.new_group([0]) for _ in range(300)]
many = threads()
woken, used = idle()
print(f"  300 more: {many - alone} threads more, {woken} wake-ups a second, {used} s of a core per second")
for group in groups:
    dist.destroy_process_group(group)
del groups, group
left = threads()
print(f"  when they are destroyed: {left - alone} threads more")
assert many - alone == 3 * 300, many - alone
assert woken > 300 * 50, woken
assert left - alone < 10, left - alone
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/groups.py" 2>"$folder/stderr" || { cat "$folder/stderr"; exit 1; }
