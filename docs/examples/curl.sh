#!/bin/sh
# A jaxkv server from the shell. JAXKV_BASE_URL is its address, and JAXKV_API_KEY its key.
set -eu
url=${JAXKV_BASE_URL:-http://127.0.0.1:8000}

# The key goes through a pipe: as an argument of curl every user of the machine could read it.
ask() {
  printf 'header = "Authorization: Bearer %s"\n' "${JAXKV_API_KEY:-none}" |
    curl --config - --fail-with-body --silent --show-error --no-buffer "$@"
  echo
}

echo "== is it up? (needs no key)"
ask "$url/health"

echo "== its models"
models=$(ask "$url/v1/models")
echo "$models"
model=$(echo "$models" | grep -o '"id": *"[^"]*"' | head -n 1 | cut -d '"' -f 4)

echo "== a completion"
ask "$url/v1/completions" --json '{"model": "'"$model"'", "prompt": "def ", "max_tokens": 8}'

echo "== a chat, streamed as server-sent events"
ask "$url/v1/chat/completions" --json '{
  "model": "'"$model"'",
  "messages": [{"role": "user", "content": "Hello!"}],
  "max_tokens": 8,
  "stream": true
}'
