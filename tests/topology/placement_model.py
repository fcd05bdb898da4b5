"""The model of placement_links.py once more, in plain loops over messages: slow, and written apart from it."""

from collections import defaultdict


def slow_seconds(cluster, mesh, traffic, axis_order, node_order):
    """Seconds of the slowest link under each traffic."""
    return [_Step(cluster, mesh, axis_order, node_order).seconds(sent) for sent in traffic]


class _Step:
    def __init__(self, cluster, mesh, axis_order, node_order):
        self.cluster, self.mesh, self.node_order = cluster, mesh, node_order
        self.per_node = min(cluster.gpus_per_node, mesh.world)
        self.by_name = {switch.name: switch for switch in cluster.switches}
        self.places = []  # (rank, coordinates)
        for rank in range(mesh.world):
            left, coordinates = rank, {}
            for axis in reversed(axis_order):
                left, coordinates[axis] = divmod(left, mesh.sizes[axis])
            self.places.append((rank, coordinates))

    def groups(self, name):
        sizes, found = self.mesh.sizes, defaultdict(list)
        for rank, at in self.places:
            inner = (at["dp_shard"] * sizes["cp"] + at["cp"]) * sizes["tp"] + at["tp"]
            joined = {"batch": ("dp_replicate", "dp_shard"), "loss": ("dp_replicate", "dp_shard", "cp"), "fsdp": ("dp_shard", "cp")}
            if name in ("ep", "expert_shard"):
                share = inner // self.mesh.ep if name == "ep" else inner % self.mesh.ep
                key = at["pp"], at["dp_replicate"], share
            else:
                key = tuple(value for axis, value in sorted(at.items()) if axis not in joined.get(name, (name,)))
            found[key].append(rank)
        return [sorted(ranks) for ranks in found.values()]

    def node(self, rank):
        return self.cluster.nodes[self.node_order[rank // self.per_node]]

    def domain(self, rank):
        return self.node(rank).nvlink_domain

    def nic(self, rank):
        node = self.node(rank)
        return node.name, rank % self.per_node * len(node.nics) // self.cluster.gpus_per_node

    def way_up(self, rank):
        names = [self.node(rank).nics[self.nic(rank)[1]].leaf]
        while self.by_name[names[-1]].up is not None:
            names.append(self.by_name[names[-1]].up)
        return names

    def send(self, source, target, bytes_):
        """Over the network, where they share no domain."""
        self.load[("out", *self.nic(source))] += bytes_
        self.load[("in", *self.nic(target))] += bytes_
        ups, downs = self.way_up(source), self.way_up(target)
        for name in ups:
            if name not in downs:
                self.load["up", name] += bytes_
        for name in downs:
            if name not in ups:
                self.load["down", name] += bytes_

    def seconds(self, sent):
        self.load, self.nvlink = defaultdict(float), defaultdict(float)
        for group in self.groups(sent.groups):
            size = len(group)
            if size == 1:
                continue
            if sent.kind == "ring":
                self.ring(group, sent.bytes_)
            elif sent.kind == "alltoall":
                for source in group:
                    for target in group:
                        if source != target:
                            self.hop(group, source, target, sent.bytes_ / (size - 1))
            else:
                for first, second in zip(group, group[1:]):
                    self.hop(group, first, second, sent.bytes_)
                    self.hop(group, second, first, sent.bytes_)
        worst = max(self.nvlink.values(), default=0.0) / (self.cluster.gpu.scale_up_gb_per_s * 1e9)
        nodes = {node.name: node for node in self.cluster.nodes}
        for (way, name, *slot), bytes_ in self.load.items():
            speed = nodes[name].nics[slot[0]].gb_per_s if way in ("in", "out") else self.by_name[name].uplink_gb_per_s
            worst = max(worst, bytes_ / speed / 1e9)
        return worst

    def hop(self, group, source, target, bytes_):
        if self.domain(source) == self.domain(target):
            self.nvlink[source] += bytes_
            return
        peer = source - source % self.per_node + target % self.per_node
        if peer in group and peer != source:
            self.nvlink[source] += bytes_
            source = peer
        self.send(source, target, bytes_)

    def ring(self, group, bytes_):
        parts = []
        for rank in group:
            part = next((part for part in parts if self.domain(part[0]) == self.domain(rank)), None)
            if part is None:
                parts.append([rank])
            else:
                part.append(rank)
        for part in parts:
            for rank in part:
                self.nvlink[rank] += bytes_ * (1 if len(parts) == 1 else (len(part) - 1) / len(part))
        for part, after in zip(parts, parts[1:] + parts[:1]) if len(parts) > 1 else ():
            pairs = [(source, target) for source in part for target in after]
            rails = [(source, target) for source, target in pairs if source % self.per_node == target % self.per_node]
            for source, target in rails or pairs:
                self.send(source, target, bytes_ / len(rails or pairs))
