"""Turns a dense Llama into mixtures of experts that compute the same function, without rounding a weight.

An MLP is a sum over its neurons. So divided among experts that are all active it stays the same sum, if what the router's
weights of 1/N take away is given back by `down`, times N: a power of two, which scales of blocks take exactly. And whole copies
of it can stand behind any router whose weights add up to one.
"""

from dataclasses import dataclass

import numpy as np
from gguf import GGUFValueType, GGUFWriter

# Bytes of a block of 32 values, and of the f16 scales at its start.
BLOCK, Q4_1_BYTES, Q4_1_SCALES = 32, 20, 4


def router_by_centroids(inputs, experts, sharpness, seed):
    """A router that sends inputs of a layer, [tokens, width], to the nearest of their centroids (spherical k-means).

    The logits have the standard deviation `sharpness`. A router has no bias, so centroids are made orthogonal to the mean."""
    rng = np.random.default_rng(seed)
    mean = inputs.mean(0)
    directions = inputs - mean
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    centroids = directions[rng.choice(len(directions), experts, replace=False)]
    for _ in range(25):
        nearest = (directions @ centroids.T).argmax(1)
        sums = np.stack([directions[nearest == expert].sum(0) for expert in range(experts)])
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centroids = np.where(lengths > 0, sums / np.maximum(lengths, 1e-9), centroids)
    centroids = centroids - np.outer(centroids @ mean, mean) / (mean @ mean)
    return (centroids * sharpness / (inputs @ centroids.T).std()).astype(np.float32)


def scaled(blocks, factor):
    """Blocks of Q4_1, [..., bytes], with scales and minima times a power of two."""
    blocks = blocks.copy()
    scales = blocks[..., :Q4_1_SCALES].copy().view(np.float16)
    blocks[..., :Q4_1_SCALES] = (scales * np.float16(factor)).view(np.uint8)
    assert np.array_equal(blocks[..., :Q4_1_SCALES].copy().view(np.float16) / np.float16(factor), scales)
    return blocks


@dataclass
class Mixture:
    """Which neurons each expert has, in runs of a block of `down`, how many experts are active, and by how much `down` is scaled."""

    runs: list[np.ndarray]
    active: int
    factor: int
    routers: np.ndarray  # [layers, experts, width]

    @staticmethod
    def split(dense, experts):
        """Experts with disjoint neurons, all of which are active."""
        runs = np.split(np.arange(dense.field("llama.feed_forward_length") // BLOCK), experts)
        return Mixture(runs, experts, experts, np.zeros((dense.layers, experts, dense.width), np.float32))

    @staticmethod
    def copies(dense, active, routers):
        """Experts with all neurons, each in an order of its own."""
        rng = np.random.default_rng(7)
        runs = np.arange(dense.field("llama.feed_forward_length") // BLOCK)
        return Mixture([rng.permutation(runs) for _ in routers[0]], active, 1, routers)

    def neurons(self, expert):
        return (self.runs[expert][:, None] * BLOCK + np.arange(BLOCK)).ravel()

    def write_gguf(self, dense, path):
        """Writes the blocks of the dense file as they are, rearranged."""
        writer = GGUFWriter(path, "llama")
        for name, field in dense.reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "llama.feed_forward_length"):
                continue
            if field.types[0] == GGUFValueType.ARRAY:
                writer.add_array(name, field.contents())
            else:
                writer.add_key_value(name, field.contents(), field.types[0])
        writer.add_feed_forward_length(len(self.neurons(0)))
        writer.add_expert_count(len(self.runs))
        writer.add_expert_used_count(self.active)
        for tensor in dense.reader.tensors:
            part = tensor.name.split(".")[-2]
            name = tensor.name.replace(part, f"{part}_exps")
            if part in ("ffn_gate", "ffn_up"):
                data = [tensor.data[self.neurons(expert)] for expert in range(len(self.runs))]
            elif part == "ffn_down":
                blocks = tensor.data.reshape(len(tensor.data), -1, Q4_1_BYTES)
                data = [scaled(blocks[:, runs], self.factor).reshape(len(blocks), -1) for runs in self.runs]
            else:
                name, data = tensor.name, tensor.data
            writer.add_tensor(name, np.asarray(data), raw_dtype=tensor.tensor_type)
        for layer, router in enumerate(self.routers):
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
