#!/usr/bin/env python3
"""`/openapi.json` of a running server by a stock validator, and drawn requests of every kind that it allows.

    larder serve -m models/demo --context 128 --session-dir DIR &
    python scripts/check/openapi.py --url http://127.0.0.1:8080 [--seconds 60] [--seed 1]

The description must be valid OpenAPI. Then schemathesis asks every route but the endless `/events` with drawn values, right and wrong ones, for the given
seconds (0: only the validator). No response may have a status from 500 on, a content type that is not described, or an error of another form. Prints the versions and a
line per part; exits with 1 if one fails.

Requirements: Python 3.10, `pip install openapi-spec-validator==0.9.0 schemathesis==4.32.5`.
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from importlib.metadata import version

from openapi_spec_validator import OpenAPIV31SpecValidator

CHECKS = ["not_a_server_error", "content_type_conformance", "response_schema_conformance", "unsupported_method"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with urllib.request.urlopen(f"{args.url}/openapi.json") as response:
        description = json.load(response)
    errors = list(OpenAPIV31SpecValidator(description).iter_errors())
    for error in errors:
        print(f"{list(error.absolute_path)}: {error.message}", file=sys.stderr)
    operations = sum(len(methods) for methods in description["paths"].values())
    schemas = len(description["components"]["schemas"])
    print(f"openapi-spec-validator {version('openapi-spec-validator')}: {operations} operations, {schemas} schemas, {len(errors)} errors")
    code = 0
    if args.seconds:
        print(f"schemathesis {version('schemathesis')}:")
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{args.url}/openapi.json", "--phases", "coverage,fuzzing"]
        command += ["--checks", ",".join(CHECKS), "--exclude-path", "/events", "--max-time", str(args.seconds)]
        command += ["--seed", str(args.seed), "--continue-on-failure"]
        code = subprocess.run(command).returncode
    sys.exit(1 if errors or code else 0)


if __name__ == "__main__":
    main()
