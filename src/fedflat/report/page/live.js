// While runs go on: asks the page's own server for news, and keeps what the person has chosen.

function startLive() {
  const every = Number(document.body.dataset.every);
  if (!every) return;
  const sign = make("span", { class: "live", id: "live" }, "live");
  find("about").append(" · ", sign);
  let mark = null;
  const ask = async () => {
    try {
      const answer = await fetch("data.json", { cache: "no-store", headers: mark ? { "If-None-Match": mark } : {} });
      if (answer.ok) {
        mark = answer.headers.get("ETag");
        adopt(await answer.json());
        drawAll();
      } else if (answer.status !== 304) throw new Error(String(answer.status));
      tellLive("live", false);
    } catch {
      tellLive("no answer: is fedflat watch still running?", true);
    }
    setTimeout(ask, 1000 * every);
  };
  setTimeout(ask, 1000 * every);
}

function tellLive(text, lost) {
  const sign = find("live");
  sign.textContent = text;
  sign.classList.toggle("lost", lost);
}
