// Text that a model wrote, as document nodes: never as HTML. What would be invisible, or would reorder or recolour what
// stands around it, is spelled out: control characters, zero-width and bidirectional marks, half surrogate pairs.

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180e" +
    "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb]" +
    "|[\\udb40][\\udc00-\\udfff]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]",
  "g",
);
const NAMES = {
  "00": "NUL", "07": "BEL", "08": "BS", "0D": "CR", "1B": "ESC", "7F": "DEL", "9B": "CSI", "AD": "soft hyphen",
  "200B": "zero width space", "200C": "zero width non-joiner", "200D": "zero width joiner",
  "200E": "left-to-right mark", "200F": "right-to-left mark", "202A": "left-to-right embedding",
  "202B": "right-to-left embedding", "202C": "pop directional formatting", "202D": "left-to-right override",
  "202E": "right-to-left override", "2066": "left-to-right isolate", "2067": "right-to-left isolate",
  "2068": "first strong isolate", "2069": "pop directional isolate", "FEFF": "byte order mark",
};

function pill(text, title) {
  const made = document.createElement("span");
  made.className = "hidden-mark";
  made.textContent = text;
  made.title = title;
  return made;
}

/** The text as nodes, its hidden characters as small pills such as [U+202E]. */
export function nodes(text) {
  const made = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(HIDDEN)) {
    made.append(text.slice(end, found.index));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(2, "0");
    made.append(pill(code.length < 3 ? (NAMES[code]?.length < 4 ? NAMES[code] : `x${code}`) : `U+${code}`,
      `${NAMES[code] ?? "hidden character"} (U+${code.padStart(4, "0")})`));
    end = found.index + found[0].length;
  }
  made.append(text.slice(end));
  return made;
}

/** A number for people: four digits at most. */
export function short(value) {
  if (typeof value !== "number") return "–";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3)));
}

/** The same as plain text, for charts. */
export function spelled(text) {
  return text.replace(HIDDEN, (found) => `[U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
}
