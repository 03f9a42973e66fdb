// Says above a live part that the console is not heard, until it is heard again. It also connects again where the SSE
// extension does not: after a first request that failed, and on a connection that is open but silent.
(() => {
  const PATH = "data-hx-sse:connect", AGAIN_MS = 5000, SILENT_MS = 45000;
  const timers = new WeakMap();

  function say(part, words, link = "") {
    const line = part.previousElementSibling;
    // A screen reader reads each change aloud: the same words are not written again.
    if (line.textContent === words + link) return;
    line.replaceChildren(words);
    if (link) line.append(Object.assign(document.createElement("a"), { href: "/", target: "_blank", textContent: link }));
  }

  function expect(part, ms) {
    clearTimeout(timers.get(part));
    // The extension closes the stream of a page in the background by itself.
    timers.set(part, setTimeout(() => (document.hidden ? expect(part, ms) : connect(part)), ms));
  }

  function connect(part) {
    const open = part._htmx?.sse;
    if (!part.previousElementSibling.textContent) lost(part);
    if (open) open.reader?.cancel();
    else htmx.ajax("GET", part.getAttribute(PATH), { source: part });
    expect(part, SILENT_MS);
  }

  function lost(part, status = 0) {
    if (status === 401) say(part, "This session has ended. The page continues by itself after a ", "new login");
    else say(part, `The console ${status ? `answers with ${status}` : "does not answer"}; this page looks again by itself.`);
  }

  function on(name, act) {
    document.addEventListener(name, ({ target, detail }) => {
      if (target instanceof Element && target.hasAttribute(PATH)) act(target, detail);
    });
  }

  function failed(part, { status, ctx }) {
    lost(part, status ?? ctx?.response?.status);
    expect(part, part._htmx?.sse ? SILENT_MS : AGAIN_MS);
  }

  on("htmx:sse:error", failed);
  on("htmx:response:error", failed);
  on("htmx:error", failed);
  on("htmx:sse:after:connection", (part) => expect(part, SILENT_MS));
  on("htmx:sse:after:message", (part) => {
    say(part, "");
    expect(part, SILENT_MS);
  });
})();
