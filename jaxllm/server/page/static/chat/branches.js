// Versions of a conversation from one message on. The one that is shown is `messages` itself; the others hang as `fork` on the first
// message that differs: `{ tails, at }`, where `tails[at]` is null, because the version at `at` is the shown one.

/** Set aside what there is from `index` on. The fork belongs to the message that comes next. */
export function branchOff(messages, index) {
  const tail = messages.splice(index);
  const fork = tail[0].fork ?? { tails: [null], at: 0 };
  delete tail[0].fork;
  fork.tails[fork.at] = tail;
  fork.at = fork.tails.push(null) - 1;
  return fork;
}

/** Show version `at` of what there is from `index` on. */
export function showVersion(messages, index, at) {
  const { fork } = messages[index];
  if (!fork?.tails[at]) return;
  const tail = messages.splice(index);
  delete tail[0].fork;
  fork.tails[fork.at] = tail;
  messages.push(...fork.tails[at]);
  fork.tails[at] = null;
  fork.at = at;
  messages[index].fork = fork;
}

/** All messages of all versions. */
export function* everyMessage(messages) {
  for (const message of messages) {
    yield message;
    for (const tail of message.fork?.tails ?? []) if (tail) yield* everyMessage(tail);
  }
}
