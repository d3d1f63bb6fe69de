// What stands before the first message: a heading, and examples that are sent when they are chosen.
$("examples").onclick = (event) => {
  if (event.target !== event.currentTarget) sendMessage(event.target.textContent);
};

/** What the page has for models without a welcome of their own. */
const STANDARD_WELCOME = {
  heading: $("welcome").querySelector("h2").textContent,
  examples: [...$("examples").children].map((button) => button.textContent),
};

/** Replaces heading and examples by those that suit the model. */
function showWelcome({ heading, examples }) {
  $("welcome").querySelector("h2").textContent = heading;
  const buttons = examples.map((text) => Object.assign(make("button", "", text), { type: "button" }));
  $("examples").replaceChildren(...buttons);
}
