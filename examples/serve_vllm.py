"""Serve rollouts by vLLM: ``lightppo serve-vllm``, as a script; ``--help`` shows how."""

from lightppo.cli.serve_vllm import main

if __name__ == "__main__":
    main(prog="serve_vllm.py")
