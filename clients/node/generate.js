#!/usr/bin/env node
// Streams one generation from a running specdec, from its .proto files alone.
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';
import { describeError } from './errors.js';

const USAGE = `usage: node generate.js [--endpoint HOST:PORT] [--tls-ca FILE] [--max-new-tokens N] [--temperature T] [--raw] PROMPT

  --endpoint        the orchestrator (127.0.0.1:50050)
  --tls-ca          speak TLS and trust the authorities of this PEM file (SPECDEC_TLS_CA)
  --max-new-tokens  tokens of output at most (128)
  --temperature     0 is greedy, the default
  --raw             the prompt is plain text instead of the first turn of a chat

A bearer token is taken from SPECDEC_TOKEN.
`;
const OPTIONS = {
  endpoint: { type: 'string', default: '127.0.0.1:50050' },
  'tls-ca': { type: 'string', default: process.env.SPECDEC_TLS_CA },
  'max-new-tokens': { type: 'string', default: '128' },
  temperature: { type: 'string', default: '0' },
  raw: { type: 'boolean', default: false },
  help: { type: 'boolean', short: 'h', default: false },
};

function parseCommandLine() {
  try {
    const { values, positionals } = parseArgs({ options: OPTIONS, allowPositionals: true });
    if (values.help || positionals.length === 1) return { ...values, prompt: positionals[0] };
  } catch (error) {
    console.error(error.message);
  }
  console.error(USAGE);
  process.exit(2);
}

function connect(endpoint, tlsCa) {
  const definition = protoLoader.loadSync('specdec/v1/generation.proto', {
    includeDirs: [fileURLToPath(new URL('../../protos', import.meta.url))],
    keepCase: true, // fields are named as in the .proto files
    longs: Number,
    enums: String,
    defaults: true, // a field that was not sent reads as its zero
    oneofs: true, // `event.event` names the field that is set
  });
  const { GenerationService } = grpc.loadPackageDefinition(definition).specdec.v1;
  const credentials = tlsCa ? grpc.credentials.createSsl(readFileSync(tlsCa)) : grpc.credentials.createInsecure();
  return new GenerationService(endpoint, credentials);
}

function callMetadata() {
  const metadata = new grpc.Metadata();
  if (process.env.SPECDEC_TOKEN) metadata.set('authorization', `Bearer ${process.env.SPECDEC_TOKEN}`);
  return metadata;
}

function toRequest({ prompt, raw, temperature, 'max-new-tokens': maxNewTokens }) {
  return {
    spec: {
      ...(raw ? { text: prompt } : { chat: { messages: [{ role: 'user', content: prompt }] } }),
      sampling: { temperature: Number(temperature) },
      stop: { max_new_tokens: Number(maxNewTokens) },
    },
  };
}

async function main() {
  const options = parseCommandLine();
  if (options.help) {
    console.log(USAGE);
    return;
  }
  const client = connect(options.endpoint, options['tls-ca']);
  try {
    for await (const { event } of client.Generate(toRequest(options), callMetadata())) {
      if (event.event === 'delta') process.stdout.write(event.delta.text);
      if (event.event === 'finished') {
        const { text, reason, usage, speculative } = event.finished;
        process.stdout.write(`${text}\n`);
        console.error(
          `${reason}: ${usage.num_output_tokens} tokens in ${speculative?.num_rounds ?? 0} rounds, ` +
            `${speculative?.num_accepted_tokens ?? 0} of ${speculative?.num_draft_tokens ?? 0} draft tokens accepted`,
        );
      }
    }
  } catch (error) {
    if (grpc.status[error.code] === undefined) throw error; // a fault of this program, not of the call
    const { code, message, reason, metadata, retryAfterSeconds } = describeError(error);
    const facts = Object.entries(metadata ?? {}).map(([key, value]) => `${key}=${value}`);
    if (retryAfterSeconds !== undefined) facts.push(`retry after ${retryAfterSeconds} s`);
    console.error(`${code}${reason ? ` ${reason}` : ''}: ${message}${facts.length ? ` (${facts.join(', ')})` : ''}`);
    process.exitCode = 1;
  } finally {
    client.close();
  }
}

await main();
