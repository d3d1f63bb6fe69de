"""Conversations that are kept: reloading, the side bar, files, two tabs, and browsers that keep nothing."""

import contextlib
import json
import time

from playwright.sync_api import Error

from .browser import records

EXPORT = {"format": "larder-conversations-1", "conversations": [{
    "title": "A loaf", "created": "2026-01-02T03:04:05Z", "updated": "2026-01-02T03:04:05Z", "leaf": "b",
    "settings": {"temperature": 0.5, "top_k": "many", "__proto__": {"harm": 1}, "harm": 1}, "messages": [
        {"id": "a", "parent": None, "role": "user", "text": "Bread? <img src=x onerror=alert(1)>", "created": "2026-01-02T03:04:05Z"},
        {"id": "b", "parent": "a", "role": "assistant", "text": "Rye.", "end": "stop", "use": {"tokens": "x", "size": 1}},
        {"id": "c", "parent": "a", "role": "assistant", "text": "Wheat.", "timings": {"tokens": 2, "tokens_per_second": 3, "ttft_seconds": 1}}]}]}


def reload(test):
    """After a reload in the middle of an answer, what was written is there, stopped, and the chat goes on."""
    page = test.open()
    test.set(temperature=0.7, top_k=40, min_p=0.05, repetition_penalty=1.1, seed=7, system="You tell stories.")
    with page.expect_request("**/v1/chat/completions") as sent:
        test.send("Tell me about the old house.")
    body = sent.value.post_data_json
    for field, value in {"temperature": 0.7, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "seed": 7}.items():
        assert body[field] == value, (field, body)
    assert "top_p" not in body and "max_tokens" not in body and "system" not in body, body
    test.wait_until_streaming(300)
    page.wait_for_timeout(600)
    page.reload()
    page.wait_for_selector(".answer .tools button")
    assert test.answer().locator(".tools .quiet").inner_text().startswith("stopped")
    half = test.text()
    assert len(half) > 200 and page.locator(".answer.busy").count() == 0, half
    assert page.input_value("#system") == "You tell stories." and page.input_value("#seed") == "7"
    test.until_titles(["Tell me about the old house."])
    # Another version of it differs although there is a seed, and a new message continues it.
    with page.expect_request("**/v1/chat/completions") as sent:
        test.send("And then?", 24)
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"].split()[:20] == half.split()[:20]
    test.wait_until_written()
    whole = test.texts()
    page.reload()
    page.wait_for_selector(".answer")
    assert test.texts() == whole
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator(".answer").first.get_by_role("button", name="Regenerate").click()
    assert sent.value.post_data_json["seed"] == 8
    test.wait_until_written()
    assert page.locator(".versions").inner_text().split() == ["‹", "2", "/", "2", "›"]
    # Reloaded before the first token.
    waiting = []
    page.route("**/v1/chat/completions", lambda route: waiting.append(route))
    test.send("Nothing comes of this")
    page.wait_for_selector(".answer.busy")
    page.reload()
    with contextlib.suppress(Error):
        waiting[0].abort()
    page.wait_for_selector(".answer")
    assert test.texts()[-2:] == ["Nothing comes of this", ""]
    page.unroute("**/v1/chat/completions")
    test.answer().get_by_role("button", name="Regenerate").click()
    test.wait_until_written()
    assert test.text() and test.answer().locator(".versions").count() == 0
    # A message without an answer is no part of what follows, but stays as a version.
    test.answered("")
    test.send("Nothing comes of this either")
    test.wait_until_written()
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        test.send("And now?")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["system"] + ["user", "assistant"] * 2 + ["user"], roles
    test.wait_until_written()
    assert page.locator(".message.user").last.locator(".versions span").inner_text() == "2 / 2"


def side_bar(test):
    """The newest first; search, renaming, deleting and taking that back."""
    page = test.open()
    assert page.locator("#list-empty").inner_text() == "Conversations will be listed here."
    for title in ("The lighthouse", "The harbour", "The captain's chest"):
        page.click("#new-chat")
        test.ask(title)
    test.until_titles(["The captain's chest", "The harbour", "The lighthouse"])
    assert page.locator("#list [aria-current] .title").inner_text() == "The captain's chest"
    page.get_by_role("button", name="The lighthouse", exact=True).click()
    test.until("document.querySelector('.message.user .text').textContent === 'The lighthouse'")
    test.ask("It is (not) a house [of light]")
    test.until_titles(["The lighthouse", "The captain's chest", "The harbour"])
    page.fill("#search", "(NOT) A")
    test.until_titles(["The lighthouse"])
    assert page.locator("#list .snippet").inner_text() == "It is (not) a house [of light]"
    assert page.locator("#list mark").inner_text() == "(not) a"
    page.fill("#search", "[of")
    test.until("document.querySelector('#list .snippet')?.textContent === '…a house [of light]'")
    page.fill("#search", "harb")
    test.until_titles(["The harbour"])
    page.fill("#search", "no such text")
    test.until_titles([])
    page.press("#search", "Escape")
    test.act("The harbour", "Rename")
    page.keyboard.type("Ships <b>& boats</b>")
    page.keyboard.press("Enter")
    test.until_titles(["The lighthouse", "The captain's chest", "Ships <b>& boats</b>"])
    test.act("The captain's chest", "Rename")
    page.keyboard.type("Nothing")
    page.keyboard.press("Escape")
    assert "The captain's chest" in test.titles()
    before = records(page)
    test.act("The lighthouse", "Delete")
    test.until_titles(["The captain's chest", "Ships <b>& boats</b>"])
    assert page.locator("#welcome").is_visible() and page.evaluate("document.activeElement.id") == "undo"
    assert page.locator("#note-text").inner_text() == "“The lighthouse” was deleted."
    assert len(records(page)["messages"]) == len(before["messages"]) - 4
    page.keyboard.press("Enter")
    test.until_titles(["The lighthouse", "The captain's chest", "Ships <b>& boats</b>"])
    key = lambda record: record["id"]
    assert sorted(records(page)["messages"], key=key) == sorted(before["messages"], key=key)
    test.until("document.querySelectorAll('.message').length === 4")
    # Back and forward move between conversations.
    page.get_by_role("button", name="Ships", exact=False).first.click()
    test.until("document.querySelectorAll('.message').length === 2")
    page.go_back()
    test.until("document.querySelectorAll('.message').length === 4")


def background(test):
    """An answer goes on while another conversation is shown."""
    page = test.open()
    test.send("Tell me about the sea.", 200)
    test.wait_until_streaming()
    page.click("#new-chat")
    assert page.locator(".message").count() == 0 and page.locator("#send").is_visible()
    page.wait_for_selector("#list .dot")
    test.ask("A short one")
    page.get_by_role("button", name="Tell me about the sea.").first.click()
    test.until("document.querySelector('.message.user .text')?.textContent === 'Tell me about the sea.'")
    test.wait_until_written()
    assert "200 tokens" in test.answer().inner_text(), test.answer().inner_text()


def files(test, folder):
    """Everything that is exported comes back; hostile files are refused in a sentence, and nothing is lost."""
    page = test.open()
    test.set(temperature=0.7)
    test.ask("The lighthouse")
    test.answer().get_by_role("button", name="Regenerate").click()
    test.wait_until_written()
    page.click("#new-chat")
    test.ask("The harbour")
    with page.expect_download() as one:
        test.act("The lighthouse", "Export")
    with page.expect_download() as both:
        page.click("#export-all")
    assert (one.value.suggested_filename, both.value.suggested_filename) == ("larder-The-lighthouse.json", "larder-conversations.json")
    paths = [folder / "one.json", folder / "both.json"]
    for download, path in zip((one.value, both.value), paths):
        download.save_as(path)
    exported = json.loads(paths[1].read_text())
    assert [len(each["messages"]) for each in exported["conversations"]] == [2, 3]
    assert exported["conversations"][1] == json.loads(paths[0].read_text())["conversations"][0]
    before = records(page)
    bring = lambda *paths: page.set_input_files("#import-file", list(paths))
    bring(paths[1])
    test.until_titles(["The harbour", "The harbour", "The lighthouse", "The lighthouse"])
    assert page.locator("#note-text").inner_text() == "2 conversations were imported."
    after = records(page)
    assert all(record in after["messages"] for record in before["messages"])
    assert len({record["id"] for record in after["messages"]}) == 2 * len(before["messages"])
    strange = folder / "strange.json"
    strange.write_text("\ufeff" + json.dumps(EXPORT))
    bring(strange)
    page.get_by_role("button", name="A loaf", exact=True).click()
    test.until("document.querySelector('.message.user .text')?.textContent.startsWith('Bread? <img')")
    assert test.text() == "Rye." and page.input_value("#temperature") == "0.5" and page.input_value("#top-k") == ""
    assert page.evaluate("({}).harm") is None and page.locator("#log img").count() == 0
    test.answer().get_by_role("button", name="Next version").click()
    assert test.text() == "Wheat." and "2 tokens · 3.00 tokens/s" in test.answer().inner_text()
    before = records(page)
    for text, part in hostile():
        strange.write_bytes(text)
        bring(strange)
        note = page.locator("#side-note.wrong #note-text")
        test.until(f"document.querySelector('#side-note.wrong #note-text')?.textContent.includes({json.dumps(part)})")
        assert note.inner_text().startswith("strange.json: ") and note.inner_text().endswith("so nothing was imported."), note.inner_text()
        assert "\n" not in note.inner_text() and len(note.inner_text()) < 200
        page.evaluate("document.querySelector('#note-text').textContent = ''")
    assert records(page) == before


def hostile():
    """Files that must be refused, each with a part of the sentence."""
    def changed(**fields):
        message = EXPORT["conversations"][0]["messages"][0] | fields
        return EXPORT | {"conversations": [EXPORT["conversations"][0], EXPORT["conversations"][0] | {"messages": [message]}]}

    yield b"\xff\xfe\x00", "is not JSON"
    yield b"", "is not JSON"
    yield b"[" * 1_000_000, "is not JSON"
    yield b"x" * (64 * 2**20 + 1), "larger than 64 MiB"
    for value, part in (
        (None, "not an export"), ([], "not an export"), ({"format": "other"}, "not an export"),
        (EXPORT | {"conversations": {}}, "must be a list"),
        (EXPORT | {"conversations": [None]}, "conversation 1 has no list of messages"),
        (EXPORT | {"conversations": [{}] * 10_001}, "more than 10000 conversations"),
        (EXPORT | {"conversations": [{"title": "x", "messages": [{}] * 20_001}]}, "more than 20000 messages"),
        (EXPORT | {"conversations": [{"title": 7, "messages": []}]}, "the title of conversation 1"),
        (changed(parent="a"), "message 1 of conversation 2 follows none"), (changed(parent="zz"), "follows none"),
        (changed(id=7), "has no id"), (changed(text=["x"]), "the text of message 1"),
        (changed(role="assistant"), 'must be of the role "user"'), (changed(role="system"), 'must be of the role "user"'),
    ):
        yield json.dumps(value).encode(), part


def two_tabs(test):
    """A change in one shows in the other, and answers at the same time are versions of the same conversation."""
    page = test.open()
    test.ask("The lighthouse")
    with test.another_tab() as other:
        other.open("/" + page.evaluate("location.hash"))
        other.page.wait_for_selector(".answer")
        assert other.texts() == test.texts()
        # An answer streams in both, and its text is the same at the end.
        test.send("Tell me more", 1200)
        other.wait_until_streaming()
        assert other.page.locator("#stop").is_hidden()
        other.page.fill("#prompt", "Not now")
        other.page.press("#prompt", "Enter")
        assert other.page.locator("#announcement").inner_text() == "Another tab is generating an answer here."
        assert other.page.input_value("#prompt") == "Not now"
        test.wait_until_written()
        other.wait_until_written()
        other.until(f"document.querySelector('.answer:last-child .tools .quiet')?.textContent.includes('1200 tokens')")
        assert other.texts() == test.texts()
        # Both at once.
        for each in (test, other):
            each.set(max_tokens=80)
            each.page.fill("#prompt", "Both")
        test.page.press("#prompt", "Enter")
        other.page.evaluate("document.querySelector('#composer').requestSubmit()")
        for each in (test, other):
            each.wait_until_written()
        other.page.wait_for_timeout(500)
        kept = {record["id"]: record for record in records(page)["messages"]}
        both = [record for record in kept.values() if record["text"] == "Both"]
        answers = [record for record in kept.values() if record["parent"] in {record["id"] for record in both}]
        assert len(answers) == len(both) and all(record["end"] == "length" and record["text"] for record in answers), kept
        test.act("The lighthouse", "Rename")
        page.keyboard.type("Renamed")
        page.keyboard.press("Enter")
        other.until_titles(["Renamed"])
        test.act("Renamed", "Delete")
        other.until_titles([])
        assert other.page.locator("#welcome").is_visible()
        assert other.page.locator("#announcement").inner_text() == "The conversation was deleted in another tab."
        test.page.click("#undo")
        other.until_titles(["Renamed"])
        # Deleted while the other tab generates: its answer ends, and brings nothing back.
        other.page.get_by_role("button", name="Renamed", exact=True).click()
        other.page.wait_for_selector(".answer")
        other.send("Go on", "")
        other.wait_until_streaming(300)
        test.act("Renamed", "Delete")
        other.until("document.querySelector('#send').checkVisibility() && document.querySelectorAll('.message').length === 0")
        other.page.wait_for_timeout(1500)
        assert records(page) == {"conversations": [], "messages": []}
        assert not other.page.locator("#keeping").inner_text()
        other.page.close()
        test.page.bring_to_front()


def a_tab_that_is_closed(test):
    """The answer of a tab that was closed is stopped in the other."""
    page = test.open()
    writer = test.another_tab()
    writer.open()
    writer.send("Tell me about the sea.")
    writer.wait_until_streaming(300)
    hash = writer.page.evaluate("location.hash")
    page.goto(f"{test.url}/{hash}")
    page.reload()
    page.wait_for_selector(".answer.busy")
    writer.page.close()
    start = time.monotonic()
    page.wait_for_selector(".answer:not(.busy) .tools button")
    assert time.monotonic() - start < 8 and "stopped" in test.answer().inner_text()


def nothing_kept(test):
    """Without IndexedDB the page works and says that it keeps nothing; so it does when a write fails."""
    page = test.page
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new DOMException('no', 'SecurityError'); } });")
    test.open()
    assert page.locator("#keeping").inner_text().startswith("This browser keeps no conversations here")
    first = test.ask("The lighthouse")
    page.click("#new-chat")
    test.ask("The harbour")
    page.get_by_role("button", name="The lighthouse", exact=True).click()
    test.until("document.querySelector('.message.user .text').textContent === 'The lighthouse'")
    assert test.text() == first
    page.reload()
    test.until("document.querySelector('#list-empty').textContent !== ''")
    assert test.titles() == []


def full_disk(test):
    """A write that fails is said, and the chat goes on."""
    page = test.page
    page.add_init_script("""IDBObjectStore.prototype.put = function () { throw new DOMException("The disk is full.", "QuotaExceededError"); };""")
    test.open()
    assert test.ask("The lighthouse").strip()
    assert page.locator("#keeping").inner_text() == "The last change was not kept (The disk is full.). Export the conversation to keep it."
    assert test.ask("And then?").strip() and page.locator(".message").count() == 4
