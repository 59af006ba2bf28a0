// The page of `athanor serve`: asks one or two models side by side, and stores a vote.

const MOST_BYTES = 14 * 2 ** 20;  // of all images of a question: as base64 they fit into the server's 20 MiB
const MOST_IMAGES = 16;
const $ = (id) => document.getElementById(id);
const state = {models: [], images: [], round: null};

function element(tag, text = "", name = "") {
  const node = document.createElement(tag);
  node.textContent = text;
  if (name) node.className = name;
  return node;
}

async function start() {
  try {
    const list = await fetch("v1/models").then((answer) => answer.json());
    state.models = list.data.map((model) => model.id);
  } catch {
    return showProblem("The server does not answer. Is `athanor serve` still running? Reload the page to try again.");
  }
  $("models").replaceChildren(...state.models.map((name) => element("span", name)));
  $("blind-row").hidden = state.models.length < 2;
  if (state.models.length > 1) {
    $("empty-text").textContent = "Drop an image, type a question, and press Enter. Both models answer side by side, and "
      + "you vote for the better answer.";
  }
}

function showProblem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

// Images

async function addImages(files) {
  showProblem("");
  for (const file of files) {
    if (state.images.length >= MOST_IMAGES) {
      showProblem(`A question has at most ${MOST_IMAGES} images.`);
    } else if (state.images.reduce((sum, image) => sum + image.size, file.size) > MOST_BYTES) {
      showProblem(`${file.name} is too large: the images of a question have at most ${MOST_BYTES / 2 ** 20} MiB.`);
    } else {
      const url = await dataUrl(file);
      if (await isReadable(url)) state.images.push({name: file.name || "pasted image", size: file.size, url});
      else showProblem(`${file.name} is not an image that can be read; choose a PNG, JPEG, WebP or GIF file.`);
    }
  }
  showImages();
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

const isReadable = (url) => new Promise((resolve) => {
  const node = new Image();
  node.onload = () => resolve(true);
  node.onerror = () => resolve(false);
  node.src = url;
});

function picture(image) {
  const node = document.createElement("img");
  node.src = image.url;
  node.alt = image.name;
  return node;
}

function showImages() {
  $("images").replaceChildren(...state.images.map((image, place) => {
    const item = element("li"), remove = element("button", "\u00d7");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${image.name}`);
    remove.onclick = () => { state.images.splice(place, 1); showImages(); $("file").focus(); };
    item.append(picture(image), remove);
    return item;
  }));
  $("drop").classList.toggle("small", state.images.length > 0);
}

$("file").onchange = () => { addImages([...$("file").files]); $("file").value = ""; };
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") addImages([...event.dataTransfer.files]);
  });
}
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    addImages([...event.clipboardData.files]);
  }
});

// Questions

async function ask() {
  const question = $("question").value.trim();
  if (state.round?.running) return;
  if (!question) {
    showProblem("Type a question first.");
    return $("question").focus();
  }
  if (!state.models.length) await start();
  if (!state.models.length) return;
  showProblem("");
  keepRound();
  const models = [...state.models], isBlind = models.length > 1 && $("blind").checked;
  if (isBlind && Math.random() < 0.5) models.reverse();
  const round = {
    question, images: [...state.images], isBlind, running: true, stop: new AbortController(), vote: null,
    answers: models.map((model) => ({model, text: "", ended: false})),
  };
  state.round = round;
  const shown = element("p", question);
  $("asked").replaceChildren(...round.images.slice(0, 4).map(picture), shown);
  $("asked").hidden = false;
  $("empty").hidden = true;
  $("vote").hidden = true;
  $("columns").replaceChildren(...round.answers.map((answer, place) => makeColumn(round, answer, place)));
  setRunning(true);
  if (innerWidth <= 860) $("answers").scrollIntoView({block: "start"});
  await Promise.all(round.answers.map((answer) => fill(round, answer)));
  round.running = false;
  setRunning(false);
  if (round.answers.every((answer) => answer.ended)) showVote(round);
  else reveal(round);
}

function setRunning(isRunning) {
  $("ask").disabled = isRunning;
  $("stop").hidden = !isRunning;
}

function makeColumn(round, answer, place) {
  const node = $("answer").content.cloneNode(true).firstElementChild;
  answer.node = node;
  node.querySelector("h2").textContent = title(round, place);
  return node;
}

const title = (round, place) =>
  round.isBlind && !round.isRevealed ? `Answer ${"AB"[place]}` : round.answers[place].model;

function reveal(round) {
  round.isRevealed = true;
  round.answers.forEach((answer, place) => {
    answer.node.querySelector("h2").textContent = title(round, place);
    showFigures(answer);
  });
}

async function fill(round, answer) {
  const {node} = answer, says = node.querySelector(".state"), begun = performance.now();
  const seconds = () => (performance.now() - begun) / 1000;
  node.classList.add("waits");
  const clock = setInterval(() => {
    if (!answer.text) says.textContent = `waiting for the first token, ${seconds().toFixed(0)} s`;
  }, 500);
  says.textContent = "waiting for the first token";
  try {
    for await (const event of stream(round, answer.model)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta.content;
      if (piece) {
        node.classList.replace("waits", "comes");
        answer.text += piece;
        node.querySelector(".text").textContent = answer.text;
        says.textContent = "";
      }
      answer.reason = event.choices[0]?.finish_reason ?? answer.reason;
      answer.usage = event.usage ?? answer.usage;
    }
    answer.ended = Boolean(answer.reason);
    answer.seconds = seconds();
    says.textContent = ending(answer);
    if (!answer.text) node.querySelector(".text").textContent = "(an empty answer)";
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (!stopped) node.classList.add("failed");
    says.textContent = stopped ? "stopped" : failure(error);
  } finally {
    clearInterval(clock);
    node.classList.remove("waits", "comes");
    if (!round.isBlind) showFigures(answer);
  }
}

const ending = (answer) => !answer.reason ? "the stream ended early; ask again"
  : answer.reason === "length" ? "cut at the longest answer's number of tokens" : "";
const failure = (error) => error instanceof TypeError
  ? "The server does not answer. Is `athanor serve` still running?" : error.message;

function showFigures(answer) {
  if (!answer.usage) return;
  const tokens = answer.usage.completion_tokens;
  answer.node.querySelector(".figures").textContent =
    `${tokens} token${tokens === 1 ? "" : "s"}, ${answer.seconds.toFixed(1)} s`;
}

async function* stream(round, model) {
  const content = round.images.map((image) => ({type: "image_url", image_url: {url: image.url}}));
  const body = {
    model, stream: true, stream_options: {include_usage: true}, temperature: Number($("temperature").value),
    messages: [{role: "user", content: [...content, {type: "text", text: round.question}]}],
  };
  if ($("max-tokens").value) body.max_tokens = Number($("max-tokens").value);
  const headers = {"Content-Type": "application/json"};
  const answer = await fetch("v1/chat/completions",
    {method: "POST", headers, body: JSON.stringify(body), signal: round.stop.signal});
  if (!answer.ok) {
    const text = await answer.text();
    let message = text;
    try { message = JSON.parse(text).error.message; } catch { /* the guard answers with plain text */ }
    throw new Error(message || `status ${answer.status}`);
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Votes

function showVote(round) {
  const isPair = round.answers.length > 1;
  $("vote").classList.add("open");
  $("vote-title").textContent = isPair ? "Which answer is better?" : "Is the answer good?";
  const [first, second] = round.answers.map((answer) => answer.model);
  const choices = isPair
    ? [[title(round, 0), first, "1"], [title(round, 1), second, "2"], ["Both good", "both", "3"],
       ["Neither", "neither", "4"]]
    : [["Good", first, "1"], ["Not good", "neither", "2"]];
  $("choices").replaceChildren(...choices.map(([text, vote, key]) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.key = key;
    button.append(element("span", text), " ", element("kbd", key));
    button.onclick = () => storeVote(round, vote, button);
    return button;
  }));
  $("vote-state").textContent = "";
  $("vote").hidden = false;
  document.activeElement?.blur();  // the keys 1 to 4 vote
}

async function storeVote(round, vote, button) {
  const buttons = [...$("choices").children], says = $("vote-state");
  for (const other of buttons) other.disabled = true;
  says.classList.remove("bad");
  says.textContent = "storing the vote";
  try {
    const answers = round.answers.map(({model, text}) => ({model, text}));
    const images = round.images.map((image) => image.url);
    const body = JSON.stringify({question: round.question, images, answers, vote, blind: round.isBlind});
    const answer = await fetch("votes", {method: "POST", headers: {"Content-Type": "application/json"}, body});
    if (!answer.ok) throw new Error((await answer.json()).error.message);
  } catch (error) {
    for (const other of buttons) other.disabled = false;
    says.classList.add("bad");
    says.textContent = `The vote is not stored. ${failure(error)}`;
    return;
  }
  round.vote = vote;
  $("vote").classList.remove("open");
  button.classList.add("taken");
  says.textContent = "Vote stored. Ask the next question.";
  reveal(round);
  round.answers.forEach((answer, place) => {
    answer.node.classList.toggle("chosen", vote === answer.model || vote === "both");
    if (round.answers.length > 1) buttons[place].querySelector("span").textContent = answer.model;
  });
  if (innerWidth > 860) $("question").select();
}

function keepRound() {
  const {round} = state;
  if (!round) return;
  const item = element("li", "", "card round"), side = element("div", "", "images"), main = element("div");
  side.append(...round.images.slice(0, 4).map(picture));
  const said = element("div", "", "said");
  for (const answer of round.answers) {
    const isChosen = round.vote === answer.model || round.vote === "both";
    const cell = element("div", "", isChosen ? "chosen" : "");
    cell.append(element("span", answer.model + (isChosen ? ", voted for" : "")));
    cell.append(element("p", answer.text || answer.node.querySelector(".state").textContent));
    said.append(cell);
  }
  main.append(element("b", round.question), said);
  item.append(side, main);
  $("rounds").prepend(item);
  $("history").hidden = false;
}

// Keys

$("composer").onsubmit = (event) => { event.preventDefault(); ask(); };
$("stop").onclick = () => state.round?.stop.abort();
$("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.round?.running) state.round.stop.abort();
  const isTyping = event.target.matches("textarea, input");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || $("vote").hidden) return;
  [...$("choices").children].find((button) => button.dataset.key === event.key && !button.disabled)?.click();
});

start();
