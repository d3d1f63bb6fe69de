"""Scores a few texts with the lm-evaluation-harness, through the completions of a running `larder serve`.

    pip install "lm_eval[api]" torch transformers
    larder serve --alias demo
    python scripts/check/test_harness.py --url http://127.0.0.1:8080

The harness asks for the log-probabilities of echoed prompts. Prints `ok`; exits with 1 if the demo model does not prefer each likely ending.
"""

import argparse
import json
import os
import pathlib
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

DEMO = pathlib.Path(__file__).parents[2] / "models" / "demo"
# A beginning, a likely ending and an unlikely one.
TEXTS = [("The old man went to the", " sea", " xylophone"), ("She opened the", " door", " qqq"),
         ("Once upon a", " time", " zebra"), ("He sat down on the", " chair", " because")]
TASK = """task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "texts.jsonl"
        file.write_text("".join(json.dumps({"text": text, "endings": endings}) + "\n" for text, *endings in TEXTS))
        (pathlib.Path(folder) / "endings.yaml").write_text(TASK.format(file=file))
        model = {"model": args.model, "base_url": f"{args.url}/v1/completions", "tokenizer": str(DEMO), "num_concurrent": 2}
        results = lm_eval.simple_evaluate("local-completions", model_args=model, tasks=["endings"],
                                          task_manager=TaskManager(include_path=folder))
    accuracy = results["results"]["endings"]["acc,none"]
    assert accuracy == 1, results["results"]
    print("ok endings")


if __name__ == "__main__":
    main()
