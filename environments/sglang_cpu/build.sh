#!/bin/sh
# SGLang's environment for CPUs, apart from ours: build.sh [folder, by default .sglang-cpu at the root of the project]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../../.sglang-cpu}
pip="$folder/bin/python -m pip install --quiet --disable-pip-version-check"

"${PYTHON:-python3}" -m venv "$folder"
# torch by itself first: a range in a later install would take the newest build, with gigabytes of CUDA.
$pip torch==2.13.0
$pip -r "$here/requirements.txt"
# Their own requirements are for GPUs.
$pip --no-deps sglang==0.5.23 torchvision==0.28.0

packages=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp "$here/sglang_on_cpu.py" "$packages/"
echo "import sglang_on_cpu" > "$packages/sglang_on_cpu.pth"

SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1 "$folder/bin/python" -W ignore -c "import sglang.srt.managers.scheduler"
echo "SGLang is ready: engine=sglang engine.sglang.python=$(cd "$folder" && pwd)/bin/python"
