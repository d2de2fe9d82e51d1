// Keys that press the page's own buttons and links, as their data-key says. Without it the pages work the same.
const cards = [...document.querySelectorAll("[data-card]")];
const target = document.getElementById(location.hash.slice(1)); // :target comes later than this script
let chosen = cards.findIndex((card) => target?.contains(card));
let isSent = false; // what is typed while the next page comes isn't about this one

function choose(place, isAsked) {
  if (!cards[place]) return;
  cards[chosen]?.removeAttribute("aria-current");
  chosen = place;
  cards[chosen].setAttribute("aria-current", "true");
  if (!isAsked) return;
  cards[chosen].focus({ preventScroll: true });
  cards[chosen].scrollIntoView({ block: "nearest" });
}

function find(key) {
  const selector = `[data-key="${CSS.escape(key)}"]`;
  return cards[chosen]?.querySelector(selector) ?? document.querySelector(selector);
}

function press(key) {
  if (key === "j" || key === "k") return choose(chosen + (key === "j" ? 1 : -1), true), true;
  const element = find(/^[0-9]$/.test(key) ? "0…9" : key);
  if (!element) return false;
  const details = element.closest("details");
  if (element.matches("summary")) {
    details.open = !details.open;
    details.scrollIntoView({ block: "nearest" });
    details.querySelector("input")?.focus();
    return true;
  }
  if (details) details.open = true;
  if (element.type === "number") {
    element.value = key === "0" ? "10" : key;
    element.form.requestSubmit();
  } else if (element.matches("input, textarea")) {
    element.focus();
  } else {
    isSent = element.matches("a");
    element.click();
  }
  return true;
}

// An annotation is sent without leaving the page: if it can't be written, what was typed is still there.
async function send(form, button) {
  isSent = true;
  try {
    const body = new URLSearchParams(new FormData(form, button));
    const answer = await fetch(form.action, { method: "POST", headers: { Accept: "application/json" }, body });
    if (!answer.ok) throw new Error(await readMessage(answer));
    const next = new URL((await answer.json()).to, location.href);
    const isHere = next.pathname + next.search === location.pathname + location.search;
    if (!isHere) return location.assign(next);
    history.replaceState(null, "", next);
    location.reload();
  } catch (error) {
    const told = form.querySelector(".box") ?? form.appendChild(document.createElement("p"));
    told.className = "box bad";
    told.textContent = `Not written: ${error.message}`;
    isSent = false;
  }
}

async function readMessage(answer) {
  const text = await answer.text();
  return new DOMParser().parseFromString(text, "text/html").querySelector("main p")?.textContent ?? text;
}

document.addEventListener("submit", (event) => {
  if (event.target.method !== "post") return;
  event.preventDefault();
  if (!isSent) send(event.target, event.submitter);
});
addEventListener("pageshow", () => { isSent = false; });
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.matches("input, select, textarea");
  if (isTyping && event.key === "Escape") event.target.blur();
  if (isTyping && event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  if (isTyping || isSent || event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (press(event.key)) event.preventDefault();
});
if (cards.length) choose(Math.max(chosen, 0), false);
