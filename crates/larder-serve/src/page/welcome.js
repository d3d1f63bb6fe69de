// What stands before the first message: a heading, and examples that are sent when they are chosen.
$("examples").onclick = (event) => {
  if (event.target !== event.currentTarget) sendMessage(event.target.textContent);
};

/** Replaces heading and examples by those that suit the model. */
function showWelcome({ heading, examples }) {
  $("welcome").querySelector("h2").textContent = heading;
  const buttons = examples.map((text) => Object.assign(make("button", "", text), { type: "button" }));
  $("examples").replaceChildren(...buttons);
}
