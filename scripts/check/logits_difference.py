#!/usr/bin/env python3
"""Compares two files of `larder logits` for the same tokens: how far the second is from the first.

    larder logits -m STORE --tokens TOKENS.json --out A
    larder logits -m STORE --tokens TOKENS.json --out B -o flash-attn --device cuda
    scripts/check/logits_difference.py A B

Prints the mean KL divergence of the next token's distribution in nats, over all tokens and over those whose routers choose the same
experts in each layer; how many these are; and for how many the likeliest token is the same. Needs numpy.
"""

import json
import struct
import sys

import numpy as np


def load(path):
    """The tensors of a safetensors file, by name."""
    data = open(path, "rb").read()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    header.pop("__metadata__", None)
    kinds = {"F32": np.float32, "I32": np.int32}
    return {
        name: np.frombuffer(body[slice(*of["data_offsets"])], kinds[of["dtype"]]).reshape(of["shape"])
        for name, of in header.items()
    }


def log_softmax(logits):
    logits = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    first, second = load(sys.argv[1]), load(sys.argv[2])
    logits = [of["full_logits"] for of in (first, second)]
    own, other = map(log_softmax, logits)
    kl = (np.exp(own) * (own - other)).sum(1)
    choices = [name for name in first if name.startswith("topk_ids.")]
    same = np.ones(len(kl), bool)
    for name in choices:
        same &= (np.sort(first[name], 1) == np.sort(second[name], 1)).all(1)
    likeliest = (logits[0].argmax(1) == logits[1].argmax(1)).mean()
    print(f"KL divergence of {len(kl)} tokens: {kl.mean():.5f} nats")
    if same.any():
        print(f"of the {same.sum()} with the same choices: {kl[same].mean():.5f} nats")
    print(f"the likeliest token is the same for {100 * likeliest:.1f} %")


main()
