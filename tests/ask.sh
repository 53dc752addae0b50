#!/usr/bin/env bash
# An agent in a shell: asks, says "Sure?", and asks again.  ask.sh ROW_FILE
question=$(python3 -c 'import json, sys; p = json.load(open(sys.argv[1]))["prompt"]; print(p if isinstance(p, str) else p[-1]["content"])' "$1")

ask() {
    curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
        -H "Content-Type: application/json" -d "{\"model\": \"$OPENAI_MODEL\", \"max_tokens\": 16, \"messages\": $1}" |
        python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"][0]["message"]["content"]))'
}

messages="[{\"role\": \"user\", \"content\": \"$question\"}]"
answer=$(ask "$messages") || exit 1
ask "${messages%]}, {\"role\": \"assistant\", \"content\": $answer}, {\"role\": \"user\", \"content\": \"Sure?\"}]"
