# megafp8 with Transformer Engine for NVIDIA GPUs (Ada, Hopper, Blackwell), with the versions that the GPU tests ran with.
# The host needs NVIDIA's driver 580 or newer, and the NVIDIA Container Toolkit.
#   docker build -t megafp8 .
#   docker run --rm --gpus all --ipc host -v "$PWD:/workspace" megafp8 megafp8 doctor
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1
# nvcc, g++ and ninja compile Transformer Engine's torch part if its release has no wheel for this torch. Triton needs g++
# and Python.h at run time: it compiles a launcher for each kernel.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv git g++ ninja-build \
 && rm -rf /var/lib/apt/lists/* \
 && python3.12 -m venv /opt/venv
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
# torch's cuDNN. Transformer Engine looks here first; with another one its attention would not be fused.
ENV CUDNN_HOME=/opt/venv/lib/python3.12/site-packages/nvidia/cudnn
WORKDIR /opt/megafp8
# The packages come before the sources: a change of the sources does not install them again.
COPY constraints-gpu.txt .
RUN pip install --no-cache-dir -c constraints-gpu.txt torch setuptools wheel packaging pybind11 nvidia-cudnn-frontend \
 && pip install --no-cache-dir -c constraints-gpu.txt --no-build-isolation 'transformer-engine[pytorch]'
COPY . .
# A build has no GPU, so that it cannot run the doctor: `pip check` compares the versions.
RUN pip install --no-cache-dir -c constraints-gpu.txt --no-build-isolation -e '.[hf,data]' && pip check
WORKDIR /workspace
CMD ["megafp8", "doctor"]
