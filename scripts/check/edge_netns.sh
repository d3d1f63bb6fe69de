#!/bin/sh
# Runs three workers in separate network namespaces, with delay and loss on the links to the client, and compares the
# text with that of one machine. Prints "texts are equal" or fails. Needs root, iproute2, and for delay and loss the
# kernel's netem.
#
#   sudo scripts/check/edge_netns.sh LARDER [STORE] [DELAY] [LOSS]        e.g. target/release/larder models/demo 5ms 1%
set -eu
larder=$(realpath "$1") store=$(realpath "${2:-models/demo}") delay=${3:-5ms} loss=${4:-1%}
work=$(mktemp -d)
id=$$
workers=""

clean() {
    for pid in $workers; do kill "$pid" 2>/dev/null || true; done
    for i in 1 2 3; do ip netns del "larder$id-$i" 2>/dev/null || true; done
    ip link del "lb$id" 2>/dev/null || true
    rm -rf "$work"
}
trap clean EXIT INT TERM

ip link add "lb$id" type bridge
ip addr add 10.231.7.254/24 dev "lb$id"
ip link set "lb$id" up
for i in 1 2 3; do
    ip netns add "larder$id-$i"
    ip link add "lv$id$i" type veth peer name eth0 netns "larder$id-$i"
    ip link set "lv$id$i" master "lb$id" up
    ip -n "larder$id-$i" addr add "10.231.7.$i/24" dev eth0
    ip -n "larder$id-$i" link set eth0 up
    ip -n "larder$id-$i" link set lo up
    for side in "" "-n larder$id-$i"; do
        device=$([ -z "$side" ] && echo "lv$id$i" || echo eth0)
        # shellcheck disable=SC2086
        tc $side qdisc add dev "$device" root netem delay "$delay" loss "$loss" 2>/dev/null ||
            echo "no netem in this kernel: $device has neither delay nor loss" >&2
    done
    ip netns exec "larder$id-$i" "$larder" edge worker -m "$store" --name "worker$i" --threads 1 \
        --listen "10.231.7.$i:7070" 2>"$work/worker$i.log" &
    workers="$workers $!"
    printf '[[server]]\nname = "worker%s"\naddress = "http://10.231.7.%s:7070"\n' "$i" "$i" >>"$work/topology.toml"
done
sleep 2
# The client has only the first shard of each layer, so nearly all experts must come from the workers.
cp -r "$store" "$work/thin"
find "$work/thin/experts" -name 'E*.safetensors' ! -name 'E000.safetensors' -delete

write() { "$larder" run "$@" -p "Once upon a time" -n 1500 --ignore-eos --temperature 0; }
write -m "$store" --cache all >"$work/one" 2>/dev/null
# During the run, one link after the other is down for a while.
(
    for i in 3 2 1; do
        sleep 0.4
        ip -n "larder$id-$i" link set eth0 down
        sleep 0.4
        ip -n "larder$id-$i" link set eth0 up
    done
) 2>/dev/null &
workers="$workers $!"
write -m "$work/thin" --edge "$work/topology.toml" -o edge-deadline=300 >"$work/several"
cmp "$work/one" "$work/several"
echo "texts are equal"
