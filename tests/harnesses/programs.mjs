// Agents built with JavaScript's harnesses, as in programs.py: `node programs.mjs MODE`, with the task on stdin.

import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const MODEL = process.env.OPENAI_MODEL ?? "policy";
const openai = createOpenAI();
const anthropic = createAnthropic({ baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1` });
const MODELS = {
  chat: () => openai.chat(MODEL),
  responses: () => openai.responses(MODEL),
  messages: () => anthropic(MODEL),
};
const tools = {
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number(), b: z.number(), note: z.string().optional() }),
    execute: async ({ a, b }) => String(a + b),
  }),
};

async function aiSdk(prompt, protocol, stream) {
  const messages = [{ role: "user", content: prompt }];
  const asked = {
    model: MODELS[protocol](),
    system: "Be brief.",
    tools,
    stopWhen: stepCountIs(5),
    maxOutputTokens: 300,
  };
  for (const more of [[], [{ role: "user", content: "Are you sure?" }]]) {
    messages.push(...more);
    const made = stream ? streamText({ ...asked, messages }) : await generateText({ ...asked, messages });
    if (stream) await made.consumeStream();
    messages.push(...(await made.response).messages);
  }
}

const [, protocol, stream] = process.argv[2].match(/^ai-sdk-(chat|responses|messages)(-stream)?$/);
await aiSdk(JSON.parse(readFileSync(0, "utf8")).prompt, protocol, Boolean(stream));
