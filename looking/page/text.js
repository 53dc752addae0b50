// Text that a model wrote, as document nodes: never as HTML. What would be invisible, or would reorder or recolour what
// stands around it, is spelled out: control characters, zero-width and bidirectional marks, half surrogate pairs.

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180e" +
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb]" +
    "|[\\udb40][\\udc00-\\udfff]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);

/** The text as nodes, its hidden characters as small marks such as U+202E. */
export function nodes(text) {
  const made = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    const mark = document.createElement("span");
    mark.className = "hidden-mark";
    mark.textContent = `U+${found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    made.append(text.slice(end, found.index), mark);
    end = found.index + found[0].length;
  }
  made.append(text.slice(end));
  return made;
}

/** A number for people: four digits at most, unless numbers of this `distance` need more to differ. */
export function short(value, distance = Infinity) {
  if (typeof value !== "number") return "–";
  const size = Math.abs(value);
  const digits = Math.max(size >= 100 ? 4 : 3, Math.ceil(Math.log10(size / (distance || Infinity))) + 1);
  const rounded = Number(value.toPrecision(digits));
  return size >= 1e5 || (size > 0 && size < 1e-3) ? rounded.toExponential().replace("e+", "e") : String(rounded);
}
