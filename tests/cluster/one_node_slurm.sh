#!/bin/bash
# A real Slurm of one node on the loopback address, for tests: munged, slurmctld and slurmd of Debian's slurm-wlm.
#
#   one_node_slurm.sh start DIR   starts it and prints what to export; everything it keeps lies in DIR
#   one_node_slurm.sh stop DIR    stops it
#
# Runs as the calling user, root or not, without systemd and beside any other Slurm. The node says that it has four
# cores and two H100, whatever is there, so that jobs run side by side and GPUs can be asked for.
set -euo pipefail

die() { echo "one_node_slurm.sh: $*" >&2; exit 1; }

[[ $# == 2 && $1 =~ ^(start|stop)$ ]] || die "expected: start DIR, or stop DIR"
mkdir -p "$2"
dir=$(cd "$2" && pwd)
PATH=$PATH:/usr/sbin

stop() {
    local name pid
    for name in slurmd slurmctld munged; do
        pid=$(cat "$dir/$name.pid" 2>/dev/null) || continue
        kill "$pid" 2>/dev/null || continue
        for _ in {1..100}; do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
}

if [[ $1 == stop ]]; then stop; exit; fi

for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || die "$program is not installed; Debian has it in slurm-wlm and munge"
done
[[ -e $dir/slurm.conf ]] && die "$dir is in use; stop it, or choose another directory"
trap 'stop; tail -n 3 "$dir"/*.log >&2 || true' ERR

read -r controller_port node_port < <(python3 - <<'PY'
import socket
ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(port.getsockname()[1] for port in ports))
PY
)
user=$(id -un) host=$(hostname -s)
mkdir -p "$dir"/{state,spool}
chmod 700 "$dir"
(umask 077 && dd if=/dev/urandom of="$dir/munge.key" bs=64 count=1 status=none)

cat >"$dir/slurm.conf" <<CONF
ClusterName=onenode
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$controller_port
SlurmdPort=$node_port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$dir/munge.socket
CommunicationParameters=NoInAddrAny
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=200000,bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait=5
OverTimeLimit=0
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 Gres=gpu:h100:2 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
PartitionName=closed Nodes=$host AllowAccounts=nobody State=UP
CONF
touch "$dir"/gpu{0,1}  # stand for devices
echo "NodeName=$host Name=gpu Type=h100 File=$dir/gpu[0-1]" >"$dir/gres.conf"
export SLURM_CONF=$dir/slurm.conf

munged --force --key-file "$dir/munge.key" --socket "$dir/munge.socket" --pid-file "$dir/munged.pid" \
    --log-file "$dir/munged.log" --seed-file "$dir/munged.seed" --num-threads 2
slurmctld
slurmd -N "$host"
for _ in {1..100}; do
    [[ $(sinfo --noheader --partition main --format %t 2>/dev/null) == idle ]] && break
    sleep 0.1
done
[[ $(sinfo --noheader --partition main --format %t) == idle ]] || { sinfo >&2; false; }
echo "export SLURM_CONF=$SLURM_CONF"
