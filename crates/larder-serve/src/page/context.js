// How full the context is, and what was cut so that all fits.
/** The server's context in tokens. */
let contextSize = 0;

/** Shows how many tokens of the context are in use; nothing while that is unknown. */
function showContext(tokens, size = contextSize) {
  $("context").hidden = !tokens || !size;
  if ($("context").hidden) return;
  const meter = $("context-meter");
  meter.setAttribute("aria-valuemax", size);
  meter.setAttribute("aria-valuenow", tokens);
  meter.setAttribute("aria-valuetext", `${tokens} of ${size} tokens`);
  meter.classList.toggle("high", tokens > 0.75 * size);
  meter.firstElementChild.style.width = `${(100 * Math.min(tokens, size)) / size}%`;
  $("context-text").textContent = `context ${tokens} of ${size}`;
}

/** Shows the context after the last answer of a path, or during its generation. */
function showContextOf(path, generation) {
  const isGrowing = generation?.contextTokens && path.includes(generation.answer) && !generation.answer.use;
  if (isGrowing) return showContext(generation.contextTokens);
  const { use } = path.findLast((message) => message.use) ?? {};
  showContext(use?.tokens ?? 0, use?.size);
}

/** The first turn that was part of the last answer's prompt if turns were left out, and the sentence before it. */
function contextCut(path) {
  // An answer that was stopped does not know.
  const turns = path.findLast(({ use }) => use?.dropped_turns !== undefined)?.use.dropped_turns;
  if (!turns) return {};
  const text = turns === 1 ? "The turn above was left out of the context" : `The ${turns} turns above were left out of the context`;
  return { first: path.filter(({ role }) => role === "user")[turns], text };
}

/** The sentences about what an answer's context has lost. */
function contextNotices({ dropped_turns: turns = 0, shifts = 0 }) {
  const count = (number, one, many) => (number === 1 ? one : many.replace("#", number));
  const notices = [];
  if (turns) notices.push(count(turns, "The oldest turn was left out.", "The # oldest turns were left out."));
  if (shifts) notices.push(`Older tokens were dropped during the answer, ${count(shifts, "once", "# times")}.`);
  return notices.length ? ["The context is full.", ...notices] : [];
}
