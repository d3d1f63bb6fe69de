#!/usr/bin/env python3
"""How often the absent expert with the best score is wanted next: whether scores from the past can say what to read ahead.

    absent_candidates.py FOLDER        with the routing traces of sequences, one safetensors file each (`expert_ids [tokens, layers, k]`)

Each layer keeps its least recently used experts in slots. The score is a logistic regression, fitted on some sequences, on what a
learned eviction network sees too: the time since the last use, and counts of uses that decay at three rates. Other sequences then
give, for each token and layer, the absent expert with the best score, and whether the token uses it.

Requirements: Python 3.10, `pip install numpy==2.4.6 safetensors==0.8.0`.
"""

import argparse
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

EXPERTS = 32
DECAYS = (0.7, 0.95, 0.99)
NEVER = -1e4
FIRST = 16  # tokens at the start of a sequence that are left out


def visits(file, slots):
    """(features, wanted, absent) per token: [layers, experts, features], [layers, experts] twice."""
    ids = load_file(file)["expert_ids"].astype(int)
    layers = ids.shape[1]
    last = np.full((layers, EXPERTS), NEVER)
    counts = [np.zeros((layers, EXPERTS)) for _ in DECAYS]
    for token, chosen in enumerate(ids):
        recent = np.argsort(-last, axis=1, kind="stable")[:, :slots]
        absent = np.ones((layers, EXPERTS), bool)
        np.put_along_axis(absent, recent, np.take_along_axis(last, recent, 1) == NEVER, 1)
        wanted = np.zeros((layers, EXPERTS), bool)
        np.put_along_axis(wanted, chosen, True, 1)
        if token >= FIRST:
            age = np.log1p(token - last)
            yield np.stack([age, *counts, np.log1p(counts[-1]), np.ones_like(age)], -1), wanted, absent
        last[wanted] = token
        for count, decay in zip(counts, DECAYS):
            count *= decay
            count += wanted


def fit(files, slots):
    """Weights of the regression, and how often an absent expert is wanted."""
    pairs = [(x[absent], wanted[absent]) for file in files for x, wanted, absent in visits(file, slots)]
    x, y = (np.concatenate(part) for part in zip(*pairs))
    weights = np.zeros(x.shape[1])
    for _ in range(12):
        p = 1 / (1 + np.exp(-x @ weights))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + 1e-3 * np.eye(len(weights))
        weights -= np.linalg.solve(hessian, x.T @ (p - y))
    return weights, y.mean()


def judge(files, slots, weights):
    """Hit rate; how often the best absent expert is wanted; the same for the tenth with the best scores; its share of the misses."""
    hits, wants, misses, best = 0, 0, 0, []
    for file in files:
        for x, wanted, absent in visits(file, slots):
            score = np.where(absent, x @ weights, -np.inf)
            top = score.argmax(1)
            rows = np.arange(len(top))
            best.append(np.stack([score[rows, top], wanted[rows, top] & absent[rows, top]], 1))
            hits, wants, misses = hits + (wanted & ~absent).sum(), wants + wanted.sum(), misses + (wanted & absent).sum()
    best = np.concatenate(best)
    best = best[np.argsort(-best[:, 0])]
    return hits / wants, best[:, 1].mean(), best[: len(best) // 10, 1].mean(), best[:, 1].sum() / misses


def main():
    parser = argparse.ArgumentParser(description="How often the absent expert with the best score is wanted next")
    parser.add_argument("folder", type=Path)
    files = sorted(parser.parse_args().folder.glob("*.safetensors"))
    fitted, judged = files[0:60:6], files[61::10]
    print("slots of 32 | hit rate | an absent expert is wanted | the best one is | of the best tenth | share of all misses")
    for slots in (8, 12, 16):
        weights, any_absent = fit(fitted, slots)
        hit_rate, best, tenth, share = judge(judged, slots, weights)
        print(f"{slots} | {hit_rate:.3f} | {any_absent:.3f} | {best:.3f} | {tenth:.3f} | {share:.3f}")


if __name__ == "__main__":
    main()
