"""Several machines, as network namespaces: two ranks in one each, the server in a third, joined by a bridge. Each has a
host name and a loopback device of its own. Skipped where the system allows no namespaces."""

import contextlib
import json
import subprocess
import sys

import pytest
from live import SMALL, Process, running
from server_fixture import ROOT, make_tiny

pytestmark = pytest.mark.slow

PORT, MASTER = "8000", "29555"  # nobody else is in these namespaces


class Node:
    """A namespace: `command` is what enters it."""

    def __init__(self, holder: subprocess.Popen, *kinds: str):
        self.holder = holder
        self.enter = ["nsenter", "-t", str(holder.pid), "-U", *kinds, "--preserve-credentials", f"--wdns={ROOT}"]

    def run(self, command: str) -> None:
        done = subprocess.run(
            [*self.enter, "sh", "-ec", command], capture_output=True, text=True, timeout=20, encoding="utf-8"
        )
        if done.returncode:
            raise OSError(f"{command}: {done.stderr}")


def hold(command: list[str], stack: contextlib.ExitStack) -> subprocess.Popen:
    """A process that keeps namespaces alive until the stack is closed."""
    holder = subprocess.Popen(
        [*command, "sh", "-c", "echo ready; exec sleep 1000"], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    stack.callback(holder.wait)
    stack.callback(holder.kill)
    if holder.stdout.readline() != "ready\n":
        raise OSError(f"{' '.join(command)} failed")
    return holder


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """{name: Node} of node-a, node-b and node-c at 10.77.0.1, .2 and .3."""
    hosts = tmp_path_factory.mktemp("nodes") / "hosts"  # else names are asked for, and nobody answers, for minutes
    hosts.write_text("127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n10.77.0.3 node-c\n", encoding="utf-8")
    with contextlib.ExitStack() as stack:
        try:
            switch = Node(hold(["unshare", "-Urn"], stack), "-n")
            switch.run(
                "ip link set lo up; ip link add br0 type bridge; ip link set br0 up; ip addr add 10.77.0.254/24 dev br0"
            )
            made = {}
            for number, name in enumerate(("node-a", "node-b", "node-c"), 1):
                holder = hold([*switch.enter, "unshare", "-nmu"], stack)
                node = made[name] = Node(holder, "-n", "-m", "-u")
                switch.run(f"ip link add {name} type veth peer name eth0 netns {holder.pid}")
                switch.run(f"ip link set {name} master br0 up")
                node.run(f"mount --bind {hosts} /etc/hosts; hostname {name}")
                node.run(f"ip link set lo up; ip addr add 10.77.0.{number}/24 dev eth0")
                node.run("ip link set eth0 up; ip route add default via 10.77.0.254")
        except OSError as error:
            pytest.skip(f"no namespaces here: {error}")
        yield made


def ranks(nodes, folder, *flags: str) -> list[Process]:
    """train_grpo.py on node-a and node-b, by torchrun."""
    started = []
    for rank, name in enumerate(("node-a", "node-b")):
        env = {"GLOO_SOCKET_IFNAME": "eth0", "VLLM_SERVER_TOKEN": "between nodes"}
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]
        words += ["--master_addr=10.77.0.1", f"--master_port={MASTER}", f"--node_rank={rank}", "train_grpo.py"]
        words += [*SMALL.split(), "--reward_funcs", "last_number", "--run_name", "run", "--max_steps", "2"]
        started.append(Process([*nodes[name].enter, *words, *flags], folder / f"{name}.log", **env))
    return started


def test_two_nodes_train_with_a_server_on_a_third(nodes, tmp_path):
    """Prompts go from each to the server, weights from rank 0, and all agree on the log-probs."""
    command = [sys.executable, "vllm_server.py", "--model", str(make_tiny()), "--host", "10.77.0.3", "--port", PORT]
    command += ["--dtype", "float32", "--max-model-len", "512"]
    token = {"VLLM_SERVER_TOKEN": "between nodes", "OMP_NUM_THREADS": "1"}
    flags = ["--generator", "vllm", "--server_urls", f"http://10.77.0.3:{PORT}", "--server_timeout", "240"]
    with contextlib.ExitStack() as stack:
        server = Process([*nodes["node-c"].enter, *command], tmp_path / "server.log", **token)
        stack.enter_context(running(server)).until(lambda: "vllm_server: ready" in server.text)
        flags += ["--output_dir", str(tmp_path / "shared"), "--logprob_diff_limit", "1e-3"]
        both = [stack.enter_context(running(one)) for one in ranks(nodes, tmp_path, *flags)]
        for one in both:
            assert one.end(300) == 0, one.text + server.text
    lines = [
        json.loads(line) for line in (tmp_path / "shared/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2] and all(line["policy_lag"] == 0 for line in lines)
