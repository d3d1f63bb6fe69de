#!/usr/bin/env python3
"""Sampled answers of structured output against their JSON Schemas.

    larder serve -m models/demo --parallel 4 --context 1024 &
    python scripts/check/schemas.py --url http://127.0.0.1:8080 [--schemas 200] [--answers 2] [--seed 1]

Makes varied schemas from a seed and asks for sampled answers to each. An answer that ended by itself must be valid by an independent
validator; those cut by length are counted, and must begin like JSON. Schemas that the server refuses are printed with its reason. Exits with
1 if an answer is invalid, or if more than a tenth of the schemas are refused.

Requirements: Python 3.10, `pip install jsonschema==4.25.1`.
"""

import argparse
import json
import random
import sys
import urllib.error
import urllib.request
from collections import Counter

import jsonschema

FORMATS = ["date", "date", "ipv4", "ipv4", "uuid", "uuid", "time", "date-time", "email"]
PATTERNS = ["^[a-z]{2,5}$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$", "^\\d{3}-\\d{4}$", "^(yes|no|perhaps)$", "^#[0-9a-f]{6}$"]
NAMES = ["name", "age", "id", "tags", "address", "is member", "größe", "a\"b", "x_1", "items"]


def string(rng, depth):
    match rng.randrange(5):
        case 0:
            return {"type": "string", "maxLength": rng.randint(0, 12)}
        case 1:
            low = rng.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}
        case 2:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 3:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case _:
            return {"enum": rng.sample(["red", "green", "blue", "", "two words", "é", 1, None, True, 2.5], rng.randint(1, 5))}


def number(rng, depth):
    low = rng.randint(-1000, 1000)
    schema = {"type": rng.choice(["integer", "number"])}
    match rng.randrange(5):
        case 0:
            schema |= {"minimum": low, "maximum": low + rng.randint(0, 5000)}
        case 1:
            schema |= {"exclusiveMinimum": low, "maximum": low + rng.randint(2, 90)}
        case 2:
            schema |= {"minimum": low}
        case 3:
            schema = {"type": "integer", "multipleOf": rng.choice([2, 5, 10])}
        case _:
            pass
    return schema


def array(rng, depth):
    schema = {"type": "array", "maxItems": rng.randint(0, 4)}
    if rng.random() < 0.3:
        return schema | {"prefixItems": [node(rng, depth + 1) for _ in range(2)], "items": False, "minItems": 2, "maxItems": 2}
    schema["items"] = node(rng, depth + 1)
    if schema["maxItems"] > 0 and rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, schema["maxItems"])
    return schema


def object_(rng, depth):
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema = {"type": "object", "properties": {name: node(rng, depth + 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    schema["additionalProperties"] = False if rng.random() < 0.95 else {"type": "boolean"}
    return schema


def node(rng, depth):
    plain = [string, number, lambda *_: {"type": "boolean"}, lambda *_: {"type": "null"}, lambda *_: {"const": {"k": [1, "v"]}}]
    nested = [array, object_, any_of] if depth < 3 else []
    return rng.choice(plain + nested)(rng, depth)


def any_of(rng, depth):
    if rng.random() < 0.3:
        return {"type": rng.sample(["string", "integer", "boolean", "null"], 2), "maxLength": 6}
    return {"anyOf": [node(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def schema_of(rng):
    schema = object_(rng, 0) if rng.random() < 0.7 else node(rng, 0)
    if rng.random() < 0.2:
        tree = {"type": "object", "properties": {"value": number(rng, 0), "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                "required": ["value", "next"], "additionalProperties": False}
        schema = {"$defs": {"tree": tree}, "type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}, "rest": schema},
                  "required": ["tree"], "additionalProperties": False}
    return schema


def ask(url, schema, seed):
    body = {"prompt": "As JSON: ", "json_schema": schema, "temperature": 1.0, "seed": seed, "max_tokens": 800}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        answer = json.load(error)["error"]
        if error.code != 400 or answer["code"] != "invalid_grammar":
            sys.exit(f"{error.code}: {answer}\n{json.dumps(schema)}")
        return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--answers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng, counts, wrong = random.Random(args.seed), Counter(), []
    for number_ in range(args.schemas):
        schema = schema_of(rng)
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        for seed in range(args.answers):
            choice = ask(args.url, schema, seed)
            if "message" in choice:
                counts["refused"] += 1
                print(f"refused: {choice['message']}\n  {json.dumps(schema)[:300]}")
                break
            if choice["finish_reason"] == "length":
                counts["cut by length"] += 1
                continue
            try:
                validator.validate(json.loads(choice["text"]))
                counts["valid"] += 1
            except (ValueError, jsonschema.ValidationError) as error:
                counts["INVALID"] += 1
                wrong.append((schema, choice["text"], str(error).splitlines()[0]))
    for schema, text, error in wrong:
        print(f"INVALID: {error}\n  {text}\n  {json.dumps(schema)}")
    print(f"{args.schemas} schemas, {args.answers} answers each: {dict(counts)}")
    sys.exit(bool(wrong) or counts["refused"] * 10 > args.schemas)


if __name__ == "__main__":
    main()
