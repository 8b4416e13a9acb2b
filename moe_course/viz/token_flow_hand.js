// What a viewer's hand reaches: the token under the pointer, and the keys; and the viewer's wish that nothing moves.

// The token whose tile an event on the canvas hits, or -1.
function tokenUnder(canvas, g, event) {
  const { left, top, width } = canvas.getBoundingClientRect();
  const scale = canvas.offsetWidth / width; // a slide may be shown larger than it was laid out
  const [x, y] = [(event.clientX - left) * scale, (event.clientY - top) * scale];
  const { w, h: high } = g.tokenTile;
  return g.tokens.findIndex((place) => x >= place.x && x <= place.x + w + 1 && y >= place.y && y <= place.y + high + 1);
}

// Does what `deeds` has for a key, unless the key belongs to the element that has the focus.
function pressed(event, deeds) {
  const { tagName, classList } = event.target;
  if (event.ctrlKey || event.altKey || event.metaKey) return; // these are the browser's or the notebook's
  if (["SELECT", "INPUT"].includes(tagName)) return event.stopPropagation();
  if (tagName === "BUTTON" && [" ", "Enter"].includes(event.key)) return event.stopPropagation();
  if (event.shiftKey || !(event.key in deeds) || (classList.contains("mc-scroll") && event.key !== " ")) return;
  event.preventDefault();
  event.stopPropagation();
  deeds[event.key]();
}

// Calls `stop` when the viewer asks for less motion from now on. Returns a function that ends this.
function onLessMotion(stop) {
  const media = matchMedia("(prefers-reduced-motion: reduce)");
  const follow = () => media.matches && stop();
  media.addEventListener("change", follow);
  return () => media.removeEventListener("change", follow);
}
