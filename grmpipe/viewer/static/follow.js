// Asks how far the index is, and offers to reload the page once the run has grown. Without it the pages work the same.
const place = document.querySelector("[data-state]");
const EVERY_MS = 3000;

async function look() {
  if (document.hidden) return;
  try {
    const state = await (await fetch(place.dataset.state)).json();
    place.ariaBusy = String(!state.whole); // so that a screen reader doesn't read out each percent
    const grown = state.done > Number(place.dataset.done);
    if (place.textContent !== state.words + (grown ? " reload" : "")) {
      place.textContent = state.words + (grown ? " " : "");
      if (grown) {
        const reload = document.createElement("a");
        reload.href = location.href;
        reload.textContent = "reload";
        place.append(reload);
      }
    }
  } catch {
    place.textContent = "the viewer has ended";
  }
}

if (place) setInterval(look, EVERY_MS);
