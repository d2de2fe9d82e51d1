#!/usr/bin/env bash
# A run over the nodes of a Slurm job: a Ray cluster, task=doctor, the run, and its continuation after a failure.
#
#   RUN_DIR=/shared/runs/first sbatch --nodes=8 deploy/slurm.sh +experiment=qwen3_32b data.path=/shared/prompts.jsonl
#
# RUN_DIR       folder of the run, on a file system that all nodes share (default: runs/slurm_<job> where sbatch was typed)
# VENV          virtual environment, at the same path on all nodes (default: .venv of the project)
# CONTAINER     image for srun's --container-image (pyxis) instead of VENV
# MOUNTS        further --container-mounts, beside RUN_DIR and the project
# ENV_VARS      names of variables that all processes get (cluster.env_vars), separated by commas; NCCL_* for a prefix
# MAX_RESTARTS  failures without a new checkpoint between them after which a run is queued again (default: 5)
# DOCTOR        0: don't examine the nodes first
# RAY_TMPDIR    folder of each node for Ray's sockets, logs and spilled objects (default: /tmp/grmpipe_<job>)
# JOIN_S        seconds in which Ray must have started on all nodes, with the import of CONTAINER (default: 600)
#
# At the end of its time Slurm sends USR1 ten minutes before: the step ends, a checkpoint is kept, the job is queued again.
# To end a run with a checkpoint: scancel --batch --signal=TERM <job>. scancel alone kills it: it continues from its last one.
#SBATCH --job-name=grmpipe
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=slurm_%j.log
set -euo pipefail

project="${PROJECT:-$SLURM_SUBMIT_DIR}"
run_dir="${RUN_DIR:-$SLURM_SUBMIT_DIR/runs/slurm_$SLURM_JOB_ID}"
venv="${VENV:-$project/.venv}"
gpus="${SLURM_GPUS_ON_NODE:-0}"
cpus="${SLURM_CPUS_ON_NODE:-1}"
port="${PORT:-$((6379 + SLURM_JOB_ID % 1000))}"
join_s="${JOIN_S:-600}"
if [[ "$run_dir" != /* ]]; then run_dir="$PWD/$run_dir"; fi # in a container, and in Ray, the working directory is another
mkdir -p "$run_dir"
# Not TMPDIR, which may exist on one node only; nor /tmp/ray, where the files of another user can't be replaced.
export RAY_TMPDIR="${RAY_TMPDIR:-/tmp/grmpipe_$SLURM_JOB_ID}"

# Ray's sockets ask for this token; all nodes read it from the shared folder.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$run_dir/.ray_token"
if [[ ! -s "$RAY_AUTH_TOKEN_PATH" ]]; then
  (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
fi
export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}" PATH="$venv/bin:$PATH"

# All variables, also after `sbatch --export`; all cores, where srun would bind a task to one; a node whose Ray ends
# doesn't end the others' (the run says what it lacks).
step=(srun --overlap --ntasks-per-node=1 --export=ALL --cpu-bind=none --kill-on-bad-exit=0 --wait=0)
container=()
if [[ -n "${CONTAINER:-}" ]]; then
  # With a name, because Ray's sockets are in /tmp: pyxis joins a step to the running container of its name, and gives
  # one without a name a /tmp of its own.
  container=("--container-name=grmpipe_$SLURM_JOB_ID" "--container-image=$CONTAINER" "--container-workdir=$project")
  container+=("--container-mounts=${MOUNTS:+$MOUNTS,}$run_dir:$run_dir,$project:$project")
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node="${nodes[0]}" others=$((${#nodes[@]} - 1))
host=("${step[@]}" --nodes=1 --ntasks=1 "--nodelist=$head_node")
on_head=("${host[@]}" "${container[@]}")
on_others=("${step[@]}" "--nodes=$others" "--ntasks=$others" "--exclude=$head_node" "${container[@]}")
# An IPv4 address that other nodes reach: /etc/hosts often has 127.0.1.1 for a machine's own name.
addresses="$("${host[@]}" bash -c 'hostname --ip-address; hostname --all-ip-addresses')"
head_ip="$(tr -s ' ' '\n' <<<"$addresses" | awk '/^[0-9.]+$/ {one = $0; if (!/^127\./) exit} END {print one}')"
address="$head_ip:$port"

steps=() again=0 ended=0 passed_on=0 current=
stop() {
  trap - EXIT
  kill "${steps[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  if [[ -n "${CONTAINER:-}" ]]; then # a container with a name outlives its steps
    "${step[@]}" "--nodes=${#nodes[@]}" "--ntasks=${#nodes[@]}" \
      enroot remove --force "pyxis_grmpipe_$SLURM_JOB_ID" >/dev/null 2>&1 || true
  fi
}
trap stop EXIT

# srun passes USR1 on to its task, which launch.py ends by; at a TERM it would kill the task.
pass_on() {
  passed_on=1
  [[ -z "$current" ]] || kill -USR1 "$current" 2>/dev/null || true
}
trap 'again=1; pass_on' USR1
trap 'ended=1; pass_on' TERM INT
# Waits for a step, to which signals are passed on. Returns its exit code.
attend() {
  local status
  if ((again || ended)); then return 130; fi
  "$@" &
  current=$!
  if ((again || ended)); then pass_on; fi # it came before the step
  while true; do
    passed_on=0 status=0
    wait "$current" || status=$?
    if ((!passed_on)); then break; fi # else a signal interrupted the wait
  done
  current=
  return "$status"
}

"${on_head[@]}" ray start --head --block "--node-ip-address=$head_ip" "--port=$port" \
  "--num-cpus=$cpus" "--num-gpus=$gpus" --include-dashboard=false --disable-usage-stats &
steps+=($!)
# Other nodes can join once the head listens. They have no Ray to ask it with.
await_head() {
  local ends=$((SECONDS + join_s))
  until timeout 5 bash -c "exec 3<>/dev/tcp/$head_ip/$port" 2>/dev/null; do
    if ((again || ended)); then return 130; fi
    if ((SECONDS > ends)) || ! kill -0 "${steps[0]}" 2>/dev/null; then
      echo "Ray does not listen at $address; see its output above" >&2
      return 1
    fi
    sleep 0.5
  done
}
status=0
await_head || status=$?
if ((status == 0 && others)); then
  "${on_others[@]}" ray start --block "--address=$address" \
    "--num-cpus=$cpus" "--num-gpus=$gpus" --disable-usage-stats &
  steps+=($!)
fi
if ((status == 0)); then
  attend "${on_head[@]}" python -m grmpipe.scheduler.processes.await_nodes "$address" "${#nodes[@]}" "$join_s" || status=$?
fi

run=(python "$project/launch.py" "$@" "cluster.address=$address" "run_dir=$run_dir" resume=auto)
run+=("cluster.env_vars=[${ENV_VARS:-}]")
if ((status == 0)) && [[ "${DOCTOR:-1}" != 0 ]]; then
  attend "${on_head[@]}" "${run[@]}" task=doctor || status=$?
fi
began=0
if ((status == 0)); then
  began=1
  attend "${on_head[@]}" "${run[@]}" || status=$?
fi

# Counts a failure. Returns whether the run is queued again: another checkpoint, or another job, begins a new count.
may_go_on() {
  local job checkpoint count latest file="$run_dir/.slurm_failures"
  latest="$(cat "$run_dir/checkpoints/latest" 2>/dev/null || echo none)"
  latest="${latest%%.*}" # step_10.1 is step 10, kept again
  read -r job checkpoint count <"$file" 2>/dev/null || true
  if [[ "${job:-} ${checkpoint:-}" != "$SLURM_JOB_ID $latest" ]]; then count=0; fi
  echo "$SLURM_JOB_ID $latest $((++count))" >"$file"
  echo "exit code $status: failure $count since the last checkpoint ($latest)"
  ((count <= ${MAX_RESTARTS:-5}))
}

# 0 done, 1 failed (a rank or a node died, for example), 2 bad configuration, 130 interrupted with a checkpoint.
if ((!again && began && !ended && status != 0 && status != 2 && status != 130 && status != 143)); then
  if may_go_on; then again=1; fi
fi
if ((again && !ended && status != 0 && status != 2)); then
  echo "exit code $status: queued again, to continue from the last checkpoint"
  stop
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
