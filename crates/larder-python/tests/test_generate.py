"""Text and tokens: as the command's, in pieces, from prompts, tokens and chats."""

import json
import re
import shutil

import larder
import pytest
from conftest import PROMPT

GREEDY = ["--temperature", 0, "--max-tokens", 40]


def test_greedy_text_is_the_commands(model, command, demo):
    printed = command("run", "-m", demo, "-p", PROMPT, *GREEDY, "--cache", "8x").stdout
    assert "".join(model.generate(PROMPT, temperature=0, max_tokens=40)) + "\n" == printed


def test_sampled_text_is_the_commands(model, command, demo):
    flags = ["--max-tokens", 30, "--seed", 5, "--temperature", 0.9, "--top-k", 20, "--top-p", 0.95]
    printed = command("run", "-m", demo, "-p", PROMPT, *flags, "--repetition-penalty", 1.1).stdout
    sampling = dict(max_tokens=30, seed=5, temperature=0.9, top_k=20, top_p=0.95, repetition_penalty=1.1)
    assert model.generate(PROMPT, **sampling).answer().text + "\n" == printed


def test_streamed_is_resident(demo, model):
    with larder.load(demo, cache="all") as resident:
        whole = resident.generate(PROMPT, temperature=0, max_tokens=60).answer()
        assert resident.stats().misses == 0
        for cache in [dict(cache="4x"), dict(cache="4M", scope="global"), dict(cache="9x", eviction="lfu")]:
            with larder.load(demo, **cache) as streamed:
                answer = streamed.generate(PROMPT, temperature=0, max_tokens=60).answer()
                assert (answer.text, answer.tokens) == (whole.text, whole.tokens), cache
                assert streamed.stats().misses > 0 and streamed.stats().read_bytes > 0


def test_pieces_have_all_tokens(model):
    stream = model.generate(PROMPT, temperature=0, max_tokens=20)
    pieces = list(stream)
    answer = stream.answer()
    assert len(pieces) > 10 and all(isinstance(piece, str) for piece in pieces)
    assert "".join(pieces) == "".join(piece.text for piece in pieces) == answer.text
    assert [token for piece in pieces for token in piece.tokens] == answer.tokens
    assert {piece.kind for piece in pieces} == {"content"}
    assert (answer.finish, len(answer.tokens)) == ("length", 20)
    assert answer.prompt_tokens == len(model.tokenize(PROMPT))
    assert model.detokenize(answer.tokens) == answer.text


def test_tokens_are_a_prompt(model):
    text = model.generate(PROMPT, temperature=0, max_tokens=12).answer()
    assert model.generate(model.tokenize(PROMPT), temperature=0, max_tokens=12).answer().tokens == text.tokens


def test_stop_strings_and_formats(model):
    stopped = model.generate(PROMPT, temperature=0, max_tokens=60, stop=".").answer()
    assert stopped.finish == "stop-string" and "." not in stopped.text
    number = model.generate("The year was ", format="regex:1[0-9]{3}", max_tokens=20).answer()
    assert re.fullmatch("1[0-9]{3}", number.text), number
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 9}}, "required": ["age"], "additionalProperties": False}
    found = json.loads(model.generate("He is ", format={"json": schema}, max_tokens=60, seed=1).answer().text)
    assert 0 <= abs(found["age"]) and set(found) == {"age"}


def test_a_closed_stream_ends_early(model):
    stream = model.generate(PROMPT, max_tokens=400, ignore_eos=True)
    next(stream)
    stream.close()
    assert stream.answer().finish == "cancelled" and len(stream.answer().tokens) < 400
    assert model.generate(PROMPT, temperature=0, max_tokens=3).answer().finish == "length"


def test_chats_use_the_template_and_what_is_computed(model):
    messages = [{"role": "user", "content": "Once upon a time there was a king"}]
    prompt = model.chat_prompt(messages)
    assert "there was a king" in prompt
    first = model.chat(messages, temperature=0, max_tokens=16)
    text = "".join(first)
    by_prompt = model.generate(model.tokenize(prompt, add_special=False), temperature=0, max_tokens=16)
    assert text == by_prompt.answer().text
    answer = model.chat(messages, temperature=0, max_tokens=16).answer()
    assert (answer.reused_tokens, answer.message) == (0, {"role": "assistant", "content": text})
    longer = [*messages, answer.message, {"role": "user", "content": "and then"}]
    again = model.chat(longer, temperature=0, max_tokens=16).answer()
    assert again.reused_tokens > 5
    tokens = model.tokenize(model.chat_prompt(longer), add_special=False)
    assert model.generate(tokens, temperature=0, max_tokens=16).answer().text == again.text


def test_stats_count_and_do_not_wait(model):
    before = model.stats()
    seen = []
    for _ in model.generate(PROMPT, temperature=0, max_tokens=60):
        seen.append(model.stats())
    assert seen[0].hits < seen[-1].hits <= model.stats().hits
    after = model.stats()
    assert after.misses > before.misses and after.read_bytes > before.read_bytes
    assert 0 < after.hit_rate < 1 and after.slots == 64 and after.compute_seconds > 0


def test_a_lossy_strategy_has_its_loss_measured(demo):
    with larder.load(demo, cache="8x", routing="prior:lambda=0.2,j=1", measure_every=4) as lossy:
        lossy.generate(PROMPT, temperature=0, max_tokens=60, ignore_eos=True).answer()
        stats = lossy.stats()
        assert stats.measured_tokens > 5 and stats.output_kl > 0
        text = lossy.generate(PROMPT, temperature=0, max_tokens=30).answer().text
        lossy.set_routing()
        exact = lossy.generate(PROMPT, temperature=0, max_tokens=30).answer().text
        lossy.set_routing("prior:lambda=0.9,j=1")
        assert len({text, exact, lossy.generate(PROMPT, temperature=0, max_tokens=30).answer().text}) > 1
    with larder.load(demo, cache="8x") as original:
        assert original.generate(PROMPT, temperature=0, max_tokens=30).answer().text == exact


def test_errors_are_the_commands_sentences(command, demo, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in [tmp_path / "nothing.gguf", tmp_path / "empty"]:
        printed = command("run", "-m", path, "-p", "x", check=False)
        with pytest.raises(larder.Error) as raised:
            larder.load(path)
        assert f"error: {raised.value}" == printed.stderr.strip().splitlines()[-1]
    untuned = shutil.copytree(demo, tmp_path / "untuned", ignore=shutil.ignore_patterns("quality.json*"))
    for model, options in [
        (demo, dict(cache="1k")),
        (untuned, dict(quality=0.01, cache="8x")),
        (demo, dict(eviction="learned", evictor="/nowhere")),
    ]:
        flags = [text for name, value in options.items() for text in ("-o", f"{name}={value}")]
        printed = command("run", "-m", model, "-p", "x", *flags, check=False).stderr.strip().splitlines()[-1]
        with pytest.raises(larder.Error) as raised:
            larder.load(model, **options)
        assert f"error: {raised.value}" == printed


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (dict(cache="much"), "cache: "),
        (dict(quality="fast", routing="original"), "cannot be given together"),
        (dict(quality="much"), "quality: must be"),
        (dict(routing="best"), "routing"),
        (dict(threads=0), "threads: must be at least 1"),
        (dict(device="tpu"), "device: must be"),
        (dict(evictor=[1]), "evictor: must be"),
    ],
)
def test_options_that_are_wrong(demo, options, fault):
    with pytest.raises(larder.Error, match=fault):
        larder.load(demo, **options)


def test_requests_that_are_wrong(model):
    with pytest.raises(TypeError):
        model.generate(PROMPT, warmth=1)
    for call, fault in [
        (lambda: model.generate([]), "the prompt has 0 tokens; it must have from 1 to"),
        (lambda: model.generate([1 << 20]), "not one of the model's"),
        (lambda: model.generate([-1]), "not one of the model's"),
        (lambda: model.generate([1] * 100_000), "must have from 1 to"),
        (lambda: model.generate(PROMPT, temperature=-1), "temperature"),
        (lambda: model.generate(PROMPT, format="regex:("), "format"),
        (lambda: model.generate(PROMPT, format={"regex": "a", "json": {}}), "with one of"),
        (lambda: model.chat([]), "no messages"),
        (lambda: model.chat([1]), "JSON object"),
        (lambda: model.chat([{"role": "user", "content": "x"}], tools=[{}]), "a function with a name"),
        (lambda: model.logits([]), "from 1 to"),
        (lambda: model.generate(PROMPT).trace, "no trace was recorded"),
        (lambda: model.set_routing("best"), "routing"),
    ]:
        with pytest.raises(larder.Error, match=fault):
            result = call()
            list(result)
    assert model.generate(PROMPT, temperature=0, max_tokens=2).answer().finish == "length"


def test_a_model_that_is_closed(demo):
    model = larder.load(demo, cache="4x")
    model.close()
    model.close()
    with pytest.raises(larder.Error, match="the model is closed"):
        list(model.generate(PROMPT))
