// The clip: two videos on top of each other, so that a clip loops and is replaced without a blink.

const FADE = 0.18; // seconds

export class Stage {
  constructor(root, { onPlaying }) {
    this.root = root;
    this.videos = [root.querySelector("#clip-a"), root.querySelector("#clip-b")];
    this.still = root.querySelector("#still");
    this.guess = root.querySelector("#guess");
    this.button = root.querySelector("#pause");
    this.backdrop = root.querySelector("#backdrop");
    this.onPlaying = onPlaying;
    this.front = 0;
    this.swapping = Promise.resolve(); // the last exchange of the two videos
    this.wanted = ""; // address of the clip to show
    this.shown = ""; // address of the clip in front
    this.guessed = ""; // address of a first picture that covers it
    this.paused = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.blobs = new Map();
    this.button.addEventListener("click", () => this.setPaused(!this.paused));
    this.labels = { play: "", pause: "" };
    const tick = () => {
      this.tick();
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  }

  name(labels, text) {
    this.labels = labels;
    for (const video of this.videos) video.setAttribute("aria-label", text);
    this.button.textContent = this.paused ? "▶" : "❚❚";
    this.button.setAttribute("aria-label", this.paused ? labels.play : labels.pause);
  }

  setPaused(paused) {
    this.paused = paused;
    this.name(this.labels, this.videos[0].getAttribute("aria-label") ?? "");
    const video = this.videos[this.front];
    if (paused) video.pause();
    else video.play().catch(() => {});
  }

  // Keeps a clip as an object in memory, so that a loop needs no further request.
  async fetch(address) {
    if (!this.blobs.has(address)) {
      const load = fetch(address).then(async (answer) => {
        if (!answer.ok) throw new Error(address);
        return URL.createObjectURL(await answer.blob());
      });
      this.blobs.set(address, load);
      load.catch(() => this.blobs.delete(address));
      if (this.blobs.size > 24) {
        const [oldest, blob] = this.blobs.entries().next().value;
        this.blobs.delete(oldest);
        blob.then((url) => setTimeout(() => URL.revokeObjectURL(url), 5000)).catch(() => {});
      }
    }
    return this.blobs.get(address);
  }

  // Shows a picture alone, behind which a clip may come.
  showStill(address, alternative) {
    this.wanted = this.shown = "";
    this.still.alt = alternative;
    this.still.src = address;
    this.still.hidden = false;
    this.button.hidden = true;
    this.still.onload = () => this.paintBackdrop(this.still);
    for (const video of this.videos) {
      video.classList.remove("front");
      video.pause();
    }
  }

  clear() {
    this.wanted = this.shown = "";
    this.still.hidden = true;
    this.button.hidden = true;
    this.backdrop.getContext("2d").clearRect(0, 0, 36, 24);
    for (const video of this.videos) {
      video.classList.remove("front", "fading");
      video.pause();
    }
  }

  // Fills what the clip leaves free, blurred.
  paintBackdrop(picture) {
    this.backdrop.getContext("2d").drawImage(picture, 0, 0, 36, 24);
  }

  // Lays a first picture of the next clip over what is shown.
  async showGuess(address) {
    this.leaving = false;
    this.guessed = address;
    if (this.guess.src !== address) this.guess.src = address;
    const complete = await this.guess.decode().then(() => true, () => false);
    if (this.guessed !== address || !complete) return;
    this.guess.classList.add("front");
    this.paintBackdrop(this.guess);
  }

  // Takes the first picture away: at once, or when the clip that is on its way is shown below it.
  dropGuess() {
    this.leaving = true;
    if (this.wanted === this.shown) this.fadeGuess();
  }

  fadeGuess() {
    if (!this.guessed) return;
    this.guessed = "";
    this.guess.classList.remove("front");
    const below = this.still.hidden ? this.videos[this.front] : this.still;
    if (this.shown || !this.still.hidden) this.paintBackdrop(below);
    else this.backdrop.getContext("2d").clearRect(0, 0, 36, 24);
  }

  async show(address) {
    if (this.wanted === address) return;
    this.wanted = address;
    let url;
    try {
      url = await this.fetch(address);
    } catch {
      if (this.wanted === address) {
        this.wanted = this.shown;
        this.fading = false;
        if (this.leaving) this.fadeGuess();
      }
      return;
    }
    await this.swapping; // the video behind may still be seen, or come to the front
    if (this.wanted !== address) return;
    const next = 1 - this.front;
    const video = this.videos[next];
    this.fading = true;
    video.classList.remove("fading");
    video.src = url;
    await new Promise((done) => {
      video.oncanplay = video.onerror = done;
    });
    if (this.wanted !== address) return;
    const paint = () => this.videos[this.front] === video && this.paintBackdrop(video);
    if (video.requestVideoFrameCallback) video.requestVideoFrameCallback(paint);
    setTimeout(paint, 250); // a paused clip presents no further frame
    this.swapping = this.swap(next, false);
    await this.swapping;
    if (this.wanted !== address) return;
    this.shown = address;
    const other = this.videos[1 - next];
    setTimeout(() => {
      if (this.wanted === address && other !== this.videos[this.front]) other.src = url;
      this.fading = false;
    }, 60);
    this.still.hidden = true;
    this.button.hidden = false;
    if (this.leaving) this.fadeGuess();
    this.onPlaying(address);
  }

  // Brings a video to the front, at once or over the end of the other one, which is then hidden.
  async swap(next, slowly) {
    const video = this.videos[next];
    const other = this.videos[1 - next];
    if (video.currentTime > 0) video.currentTime = 0;
    if (!this.paused) await video.play().catch(() => {});
    if (!this.wanted) return; // there is no clip any more
    video.style.zIndex = 1;
    other.style.zIndex = 0;
    video.classList.toggle("fading", slowly);
    other.classList.remove("fading");
    void video.offsetWidth;
    video.classList.add("front");
    this.front = next;
    if (slowly)
      await new Promise((done) => {
        video.addEventListener("transitionend", done, { once: true });
        setTimeout(done, 3000 * FADE); // where motion is reduced there is no transition
      });
    other.classList.remove("front");
    other.pause();
  }

  // Begins the loop's next round before the end of this one.
  tick() {
    const video = this.videos[this.front];
    if (this.fading || this.paused || !this.wanted || !video.duration) return;
    if (video.duration - video.currentTime > FADE && !video.ended) return;
    const next = 1 - this.front;
    if (this.videos[next].src !== video.src || this.videos[next].readyState < 2) {
      if (video.ended) video.play().catch(() => {});
      return;
    }
    this.fading = true;
    this.swapping = this.swap(next, true).then(() => (this.fading = false));
  }
}
