// Renders texts that a hostile model may write, with doubles for what only a browser has, and prints the milliseconds of each as JSON.
// The page's own scripts stand before this one.
const LENGTH = 200_000;

class ElementDouble {
  childNodes = [];
  append(...nodes) {
    this.childNodes.push(...nodes);
  }
}

function make(tag, className, ...nodes) {
  const element = new ElementDouble();
  element.tagName = tag.toUpperCase();
  element.append(...nodes);
  return element;
}

const of = (sign, length = LENGTH) => sign.repeat(length / sign.length);
// A space in an address makes it none, and a separator of lines ends no line of Markdown.
const texts = {
  divider: `a|b\n${of(" ")}|`,
  heading: `# ${of(" ")}a\u2028b`,
  item: `- ${of(" ")}a\u2028b`,
  oneAddress: `${of("[", LENGTH / 2)}](mailto:${of("a", LENGTH / 2)} b)`,
  manyAddresses: `${of("[](mailto:", 3 * LENGTH)} b)`,
  brackets: `${of("[")}](x)`,
  fence: `\`\`\`${of(" b")}\``,
  rule: `${of("- ")}x`,
  emphasis: of("**a *b __c _d ~~e "),
};
const times = Object.entries(texts).map(([name, text]) => {
  const start = performance.now();
  elementsOf(text.split("\n"), 0);
  return [name, Math.round(performance.now() - start)];
});
console.log(JSON.stringify(Object.fromEntries(times)));
