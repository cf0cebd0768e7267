// Reads the typed reason out of a failed call. Knows google.rpc.Status alone; nobody parses a message text.
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const types = protoLoader.loadSync('google/rpc/error.proto', {
  includeDirs: [fileURLToPath(new URL('protos', import.meta.url))],
  keepCase: true,
  longs: Number,
  defaults: true,
});

const decodeDetail = (types_, detail) => {
  const name = detail.type_url.split('/').pop();
  return types_[name] && { name, value: types_[name].deserialize(detail.value) };
};

/**
 * What an error of a call says.
 * @param {grpc.ServiceError} error
 * @returns {{code: string, message: string, reason?: string, metadata?: Object<string, string>, retryAfterSeconds?: number}}
 *   `reason` is a name of specdec.v1.ErrorReason without its prefix; absent where the server sent none, as when it was not reached.
 */
export function describeError(error) {
  const described = { code: grpc.status[error.code], message: error.details };
  const [encoded] = error.metadata?.get('grpc-status-details-bin') ?? [];
  if (!encoded) return described;
  for (const detail of types['google.rpc.Status'].deserialize(encoded).details) {
    const decoded = decodeDetail(types, detail);
    if (decoded?.name === 'google.rpc.ErrorInfo' && decoded.value.domain === 'specdec') {
      described.reason = decoded.value.reason;
      described.metadata = decoded.value.metadata;
    } else if (decoded?.name === 'google.rpc.RetryInfo') {
      const { seconds, nanos } = decoded.value.retry_delay;
      described.retryAfterSeconds = seconds + nanos / 1e9;
    }
  }
  return described;
}
