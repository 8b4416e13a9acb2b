// Starts the deck. A player lives while its slide is shown; what it showed last is kept for the next time.
// `mount` is the token flow's, put in front of this text if the deck has a player.
const printing = /print-pdf/i.test(location.search);
const players = new Map(); // element -> {picture, state}

function play(element) {
  if (printing || players.get(element)?.picture) return;
  const data = JSON.parse(document.getElementById(`run-${element.dataset.run}`).textContent);
  const state = players.get(element)?.state ?? JSON.parse(element.dataset.state ?? "{}");
  const entry = { state };
  players.set(element, entry);
  entry.picture = mount(element.querySelector(".live"), data, { state, onState: (now) => (entry.state = now) });
}

function stop(element) {
  const entry = players.get(element);
  if (!entry?.picture) return;
  entry.state = entry.picture.get();
  entry.picture.destroy();
  entry.picture = null;
  element.querySelector(".live").replaceChildren();
}

function follow(slide) {
  for (const element of document.querySelectorAll(".player")) {
    if (slide.contains(element)) play(element);
    else stop(element);
  }
}

await Reveal.initialize({
  width: 1280,
  height: 720,
  margin: 0,
  center: false,
  transition: "none",
  hash: true,
  history: false,
  slideNumber: "c/t",
  controls: false,
  scrollActivationWidth: null,
  pdfSeparateFragments: false,
  plugins: [RevealNotes],
});
follow(Reveal.getCurrentSlide());
Reveal.on("slidechanged", (event) => follow(event.currentSlide));
document.documentElement.dataset.ready = "1";
