// Calls a server through OpenAI's client for Node and prints as JSON what came.
const [folder, url, key] = process.argv.slice(2);
const { default: OpenAI } = await import(`${folder}/openai/index.mjs`);

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const model = "tiny";
const messages = [{ role: "user", content: "add" }];
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];

const callOf = (choice) => {
  const [call] = choice.message.tool_calls;
  return [call.function.name, JSON.parse(call.function.arguments), choice.finish_reason];
};
const errorOf = async (promise) => {
  try {
    await promise;
    return "none";
  } catch (error) {
    return [error.constructor.name, error.status, error.param, error.code];
  }
};

const found = {};
found.models = (await client.models.list()).data.map((each) => each.id);
const whole = await client.chat.completions.create({ model, messages });
found.whole = whole.choices[0].message.content;
found.tokens = whole.usage.completion_tokens;
const stream = client.chat.completions.stream({ model, messages });
found.stream = (await stream.finalChatCompletion()).choices[0].message.content;
found.call = callOf((await client.chat.completions.create({ model, messages, tools })).choices[0]);
const calling = client.chat.completions.stream({ model, messages, tools });
found["streamed call"] = callOf((await calling.finalChatCompletion()).choices[0]);
const response = await client.responses.create({ model, input: "add", max_output_tokens: 64 });
found.response = response.output_text;
const pieces = [];
const given = { model, input: "add", max_output_tokens: 64, stream: true };
for await (const event of await client.responses.create(given)) {
  if (event.type === "response.output_text.delta") pieces.push(event.delta);
}
found["streamed response"] = pieces.join("");
const completed = await client.completions.create({ model, prompt: "add", max_tokens: 64 });
found.completion = completed.choices[0].text;
const other = new OpenAI({ baseURL: `${url}/v1`, apiKey: "other", maxRetries: 0 });
found["wrong key"] = await errorOf(other.models.list());
found["too long"] = await errorOf(
  client.chat.completions.create({ model, messages, max_tokens: 1000000 }),
);
const leaving = await client.chat.completions.create({ model, messages, stream: true });
for await (const chunk of leaving) {
  leaving.controller.abort();
  found.left = chunk.object;
  break;
}
console.log(JSON.stringify(found));
