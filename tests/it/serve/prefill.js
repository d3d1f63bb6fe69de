// What the page says at each event of a prompt that slows down.
const prompt = new Prefill();
const say = (processed, time_ms) => prompt.read({ total: 8192, cache: 512, processed, time_ms });
const said = [say(512, 0), say(1024, 1900), say(1536, 4000), say(1792, 8000), say(2048, 16000), say(8192, 90000)];
const long = new Prefill().read({ total: 100, cache: 0, processed: 0, time_ms: 3000 });
console.log(JSON.stringify({ said, long, times: [0.2, 59.5, 204, 45296].map(formatLeft) }));
