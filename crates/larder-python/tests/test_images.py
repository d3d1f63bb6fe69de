"""Images: texts of transformers from each kind of picture, in prompts, tokens and chats, and sentences where there are none."""

import asyncio
import base64
import json
import os
import struct
from pathlib import Path

import larder
import pytest

VISION = Path(os.environ.get("LARDER_VISION", ""))
GREEDY = dict(temperature=0, max_tokens=12, ignore_eos=True)

pytestmark = pytest.mark.skipif("LARDER_VISION" not in os.environ, reason="$LARDER_VISION does not name the folder of models that see")


def picture(name):
    return VISION / "images" / f"{name}.png"


@pytest.fixture(scope="module")
def folder():
    return VISION / "qwen3_vl_moe"


@pytest.fixture(scope="module")
def seeing(folder):
    with larder.load(folder, context=512, threads=2) as loaded:
        yield loaded


def prompts(folder):
    return json.loads((folder / "reference.json").read_text())["prompts"]


def written(folder, prompt):
    """The greedy text of transformers behind a prompt."""
    content = (folder / "reference.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    begin, end = json.loads(content[8 : 8 + length])[f"{prompt}.generated_ids"]["data_offsets"]
    return [token for (token,) in struct.iter_unpack("<I", content[8 + length :][begin:end])]


class Drawing:
    """What is saved as a picture of Pillow is."""

    def __init__(self, name):
        self.name = name

    def save(self, fp, format=None):
        assert format == "PNG"
        fp.write(picture(self.name).read_bytes())


def test_each_kind_of_picture_gives_the_text_of_transformers(seeing, folder, command):
    content = picture("odd").read_bytes()
    want = written(folder, "one")
    for image in [content, bytearray(content), memoryview(content), picture("odd"), str(picture("odd")), Drawing("odd")]:
        answer = seeing.generate("What is this?", images=[image], **GREEDY).answer()
        assert answer.tokens == want, type(image)
    flags = ["--temperature", 0, "--max-tokens", 12, "--ignore-eos", "--json", "--image", picture("odd")]
    assert json.loads(command("run", "-m", folder, "-p", "What is this?", *flags).stdout)["ids"] == want


def test_pictures_of_pillow(seeing, folder):
    image = pytest.importorskip("PIL.Image")
    with image.open(picture("odd")) as opened:
        assert seeing.generate("What is this?", images=[opened], **GREEDY).answer().tokens == written(folder, "one")


def test_tokens_stand_for_images(seeing, folder):
    prompt = prompts(folder)["twice"]
    tokens = seeing.tokenize(prompt["text"], add_special=False)
    assert seeing.generate(tokens, images=[picture("plain")] * 2, **GREEDY).answer().tokens == written(folder, "twice")


def test_images_belong_to_messages(seeing, folder):
    for name, prompt in prompts(folder).items():
        images = [picture(image) for image in prompt["images"]]
        assert seeing.chat_prompt(prompt["messages"]) == prompt["text"]
        stream = seeing.chat(prompt["messages"], images=images, **GREEDY)
        assert [token for piece in stream for token in piece.tokens] == written(folder, name), name
        assert seeing.chat(with_own_pictures(prompt), **GREEDY).answer().tokens == written(folder, name), name
    question = [{"role": "user", "content": "What is this?"}]
    assert seeing.chat(question, images=[picture("odd")], **GREEDY).answer().tokens == written(folder, "one")


def with_own_pictures(prompt):
    """The messages of a prompt, whose images are data: URLs."""
    images = iter(prompt["images"])

    def part(part):
        if part["type"] != "image":
            return part
        data = base64.b64encode(picture(next(images)).read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    return [{**message, "content": shown(message["content"], part)} for message in prompt["messages"]]


def shown(content, part):
    return content if isinstance(content, str) else [part(one) for one in content]


def test_event_loops_take_images(seeing, folder):
    async def text():
        by_text = await seeing.agenerate("What is this?", images=[picture("odd")], **GREEDY).answer()
        question = [{"role": "user", "content": "What is this?"}]
        by_chat = await seeing.achat(question, images=[picture("odd")], **GREEDY).answer()
        return by_text.tokens, by_chat.tokens

    assert asyncio.run(text()) == (written(folder, "one"), written(folder, "one"))


def test_models_say_whether_they_see(seeing, model, folder):
    assert seeing.info()["sees"] and not model.info()["sees"]
    with larder.load(folder, context=512, vision="preload", image_tokens=256) as loaded:
        assert loaded.generate("What is this?", images=[picture("odd")], **GREEDY).answer().tokens == written(folder, "one")
    with larder.load(folder, context=512, vision="off") as loaded:
        assert not loaded.info()["sees"]
        with pytest.raises(larder.Error, match="images are refused with --vision off"):
            list(loaded.generate("x", images=[picture("dot")]))


def test_images_that_are_refused(seeing, model, command, folder):
    image, dot = {"type": "image"}, picture("dot")
    for call, fault in [
        (lambda: model.generate("x", images=[dot]), "this model takes no images; models that see are"),
        (lambda: model.chat([{"role": "user", "content": "x"}], images=[dot]), "this model takes no images"),
        (lambda: seeing.generate("x", images=[dot, b"{}"]), "image 2: .*is not a PNG, JPEG, WebP or GIF file"),
        (lambda: seeing.generate("a <|image_pad|>", images=[dot]), "the token that stands for an image"),
        (lambda: seeing.generate([1, 2], images=[dot]), "for 0 of 1 images"),
        (lambda: seeing.chat([{"role": "user", "content": [image, image]}], images=[dot]), "for 2 of 1 images"),
        (lambda: seeing.chat([{"role": "user", "content": [image]}]), "for 1 of 0 images"),
    ]:
        with pytest.raises(larder.Error, match=fault):
            list(call())
    for wrong in [[7], [None], "photo.png", b"content", dot, Drawing("dot")]:
        with pytest.raises(TypeError):
            seeing.generate("x", images=wrong)
    printed = command("run", "-m", folder, "-p", "x", "--image", "nowhere.png", check=False).stderr.strip().splitlines()[-1]
    with pytest.raises(larder.Error) as raised:
        seeing.generate("x", images=["nowhere.png"])
    assert f"error: {raised.value}" == printed
