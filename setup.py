"""Packaging. `pip install .` for a CPU, `pip install '.[te]'` beside a GPU, `'.[test]'` or `'.[dev]'` for the tests."""

import re
from pathlib import Path

from setuptools import find_packages, setup

version = re.search(r'__version__ = "(.+)"', Path("megafp8/__init__.py").read_text(encoding="utf-8"))[1]

TOKENIZERS = ["tokenizers>=0.21", "tiktoken"]
SAFETENSORS = ["safetensors>=0.8"]
# What converted models are compared with: transformers' models, and what it loads FP8 weights with.
TRANSFORMERS = ["transformers>=5", "accelerate", "compressed-tensors"]
PREPROCESSING = ["gigatoken>=0.10", "orjson", "pyarrow", "backports.zstd"]  # fast BPE and JSON, Parquet, .zst
STORAGE = ["obstore>=0.8"]  # s3://, gs://, az://
TESTS = ["pytest", "pytest-timeout", *TOKENIZERS, *SAFETENSORS, *PREPROCESSING]  # of the first set
DOCS = ["mkdocs-material>=9.6,<10", "mkdocstrings[python]", "mike>=2.1"]
# The supported versions: 0.16.1 on every Python, 0.19 on those that it is made for. See docs/dev/upstream.md.
MEGATRON_CORE = [
    'megatron-core==0.16.1; python_version < "3.12"',
    'megatron-core>=0.16.1,!=0.17.*,!=0.18.*,<0.20; python_version >= "3.12"',
]

setup(
    name="megafp8",
    version=version,
    description="Pretraining of GPT models in FP8 and FP4 on megatron-core, on GPUs and CPUs",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The megafp8 developers",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    # project_urls={"Source": ..., "Documentation": ...}, as soon as the project has an address
    keywords=["pretraining", "GPT", "FP8", "FP4", "quantization", "megatron-core", "Transformer Engine", "PyTorch"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["megafp8", "megafp8.*"]),
    package_data={
        "megafp8": ["*.pyi", "py.typed"],
        "megafp8.analysis": ["*.jinja", "*.mplstyle"],
        "megafp8.config.megatron_flags": ["*.yaml"],
    },
    py_modules=["pretrain_gpt"],
    entry_points={
        "console_scripts": ["megafp8 = megafp8.cli.main:main", "pretrain-gpt = megafp8.cli.pretrain:main"],
    },
    python_requires=">=3.11,<3.14",
    install_requires=[
        "torch>=2.6",
        *MEGATRON_CORE,
        "packaging",  # comparison of megatron-core's versions
        "numpy",
        "PyYAML",  # job files of the launchers, precision maps
        "pydantic>=2.12",  # records, checkpoints\' manifests and other files that are read back
        "psutil",  # megatron-core needs it to save a checkpoint, and does not say so
        "sentencepiece",
        "tensorboard",
        "google-crc32c",  # checksums of TensorBoard's files
        "matplotlib",
        "scipy>=1.15",  # intervals of comparisons, fits of scaling laws
        "jinja2",
        "tqdm",
        "argcomplete>=3.5",  # completion of the command in shells
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.9"],
        "hf": [*TOKENIZERS, *SAFETENSORS],
        "data": [*TOKENIZERS, *PREPROCESSING],
        "datasets": [*TOKENIZERS, *PREPROCESSING, "datasets"],
        "storage": STORAGE,
        "docs": DOCS,
        "test": TESTS,
        "dev": [
            "mypy",
            "pre-commit",
            "ruff",
            "types-psutil",
            "types-PyYAML",
            *TESTS,
            *TRANSFORMERS,
            *STORAGE,
            "moto[s3]",  # with the next two an S3 server for the tests of object storage
            "flask",
            "flask-cors",
            *DOCS,
            "pandas",  # of megafp8.read_records
            "torchao",
            "playwright",
            "prometheus-client",
            "mlflow-skinny",
        ],
    },
)
