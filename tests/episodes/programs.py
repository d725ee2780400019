"""An agent program of its own process, and a class that does the same in a worker process.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… python programs.py NUMBER

It asks until it hears the number, and is told whether it is too low.
"""

import sys

from openai import OpenAI


def guesses(client: OpenAI, number: int) -> None:
    messages = [{"role": "user", "content": "Guess."}]
    while True:
        answer = client.chat.completions.create(model="any", messages=messages)
        guess = answer.choices[0].message.content
        if int(guess) == number:
            return
        messages.append({"role": "assistant", "content": guess})
        messages.append({"role": "user", "content": "low" if int(guess) < number else "high"})


class Program:
    right = False

    def run(self, base_url: str, api_key: str, n: int) -> None:
        guesses(OpenAI(base_url=base_url, api_key=api_key), n)
        self.right = True

    def get_reward(self) -> float:
        return float(self.right)


if __name__ == "__main__":
    guesses(OpenAI(), int(sys.argv[1]))
    print("right")
