"""Versions of messages: editing, regenerating, moving between them, copying."""


def branches(test):
    page = test.open()
    test.set(temperature=1)
    first = test.ask("Tell me about the house")
    second = test.ask("And the garden")
    # An edited message is a version beside the old one, with an answer of its own.
    edit(test, 0, "Tell me about the road")
    test.until("document.querySelectorAll('.message').length === 2")
    test.wait_until_written()
    assert versions(test, 0) == "2 / 2" and test.texts()[0] == "Tell me about the road"
    road = test.text()
    step(test, 0, "Previous version")
    assert test.texts() == ["Tell me about the house", first, "And the garden", second] and versions(test, 0) == "1 / 2"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Previous version"
    page.keyboard.press("Enter")
    assert versions(test, 0) == "1 / 2", "there is none before the first"
    # Regenerating an answer in the middle makes a version of it without what followed.
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator(".answer").first.get_by_role("button", name="Regenerate").click()
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user"]
    test.wait_until_written()
    assert page.locator(".message").count() == 2 and versions(test, 1) == "2 / 2"
    step(test, 1, "Previous version")
    assert test.texts()[1:] == [first, "And the garden", second]
    step(test, 0, "Next version")
    assert test.texts() == ["Tell me about the road", road]
    step(test, 0, "Previous version")
    page.wait_for_timeout(300)
    page.reload()
    page.wait_for_selector(".answer")
    assert test.texts()[0] == "Tell me about the house", "the branch that was shown last"
    step(test, 0, "Next version")
    # Escape gives an edit up; the same text is not sent again.
    edit(test, 0, "Something else", "Escape")
    assert test.texts()[0] == "Tell me about the road" and versions(test, 0) == "2 / 2"
    edit(test, 0, "Tell me about the road")
    assert versions(test, 0) == "2 / 2"


def copies(test):
    page = test.open()
    test.answered("Some **bold** text.\n\n```rust\nfn main() {}\n```")
    test.set(system="Be brief.")
    test.send("The *lighthouse*")
    test.wait_until_written()
    test.answer().get_by_role("button", name="Copy this answer").click()
    test.until("document.querySelector('.answer .tools button').textContent === 'Copied'")
    assert test.copied() == "Some **bold** text.\n\n```rust\nfn main() {}\n```"
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Copy this message").click()
    test.until("document.querySelector('.message.user .tools button').textContent === 'Copied'")
    assert test.copied() == "The *lighthouse*"
    test.act("The *lighthouse*", "Copy as Markdown")
    test.until("document.querySelector('#note-text').textContent.includes('copied as Markdown')")
    copied = test.copied()
    assert copied.startswith("# The *lighthouse*\n\n**System**\n\nBe brief.\n\n**User**\n\nThe *lighthouse*\n\n**"), copied
    assert copied.endswith("Some **bold** text.\n\n```rust\nfn main() {}\n```\n"), copied


def edit(test, at, text, key="Enter"):
    message = test.page.locator(".message").nth(at)
    message.hover()
    message.get_by_role("button", name="Edit this message").click()
    test.page.get_by_label("Edited message").fill(text)
    test.page.get_by_label("Edited message").press(key)


def versions(test, at):
    return test.page.locator(".message").nth(at).locator(".versions span").inner_text()


def step(test, at, name):
    test.page.locator(".message").nth(at).get_by_role("button", name=name).click()
