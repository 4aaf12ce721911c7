// Shows openapi.json: a fold per operation and per schema, with the members of objects as a table.

const main = document.getElementById('main');

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  made.textContent = text;
  made.append(...children);
  return made;
}

function link(name) {
  const made = element('a', name);
  made.href = `#${name}`;
  return made;
}

// What a schema takes, in words and links. Null, which equals absence, goes without saying.
function words(schema) {
  if (schema.$ref) return [link(schema.$ref.split('/').pop())];
  if ('const' in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) {
    const values = schema.enum.filter((value) => value !== null);
    return [values.map((value) => JSON.stringify(value)).join(', ') || 'nothing'];
  }
  if (schema.anyOf) {
    const schemas = schema.anyOf.filter((one) => one.type !== 'null');
    return joined(schemas.map(words), ' or ');
  }
  if (schema.type === 'array') return ['list of ', ...words(schema.items)];
  const types = [schema.type ?? 'anything'].flat().filter((type) => type !== 'null');
  return [types.join(' or ') + bounds(schema)];
}

function joined(parts, between) {
  return parts.flatMap((part, at) => (at ? [between, ...part] : part));
}

// Those of 32-bit and 64-bit integers go without saying, too.
function bounds({ minimum, exclusiveMinimum, maximum }) {
  const tells = (bound) => bound !== undefined && Math.abs(bound) < 2 ** 31 - 1;
  const low = tells(minimum) ? ` ≥ ${minimum}` : '';
  const open = tells(exclusiveMinimum) ? ` > ${exclusiveMinimum}` : '';
  return low + open + (tells(maximum) ? ` ≤ ${maximum}` : '');
}

function table(schema) {
  const made = element('table', '');
  const head = ['member', 'takes', 'default', 'meaning'].map((text) => element('th', text));
  made.append(element('tr', '', ...head));
  for (const [name, member] of Object.entries(schema.properties)) {
    const needed = schema.required?.includes(name) ? ' *' : '';
    const preset = member.default === undefined ? '' : JSON.stringify(member.default);
    const takes = element('td', '', ...words(member));
    const cells = [element('td', preset), element('td', member.description ?? '')];
    made.append(element('tr', '', element('td', name + needed), takes, ...cells));
  }
  return made;
}

function shape(schema) {
  if (schema.properties) return [table(schema)];
  if (schema.anyOf?.some((one) => one.properties)) return schema.anyOf.flatMap(shape);
  return [element('p', '', ...words(schema))];
}

function fold(title, ...content) {
  return element('details', '', element('summary', '', ...title), element('div', '', ...content));
}

function operation(method, path, told) {
  const content = told.description ? [element('p', told.description)] : [];
  if (!told.security.length) content.push(element('p', 'Needs no key.'));
  for (const { name, in: place, schema } of told.parameters ?? []) {
    content.push(element('p', `${name} (${place}): `, ...words(schema)));
  }
  const body = told.requestBody?.content['application/json'].schema;
  if (body) content.push(element('h3', 'Body'), element('p', '', ...words(body)));
  for (const [status, reply] of Object.entries(told.responses)) {
    content.push(element('h3', status === 'default' ? 'Error' : `Reply ${status}`));
    for (const [type, { schema }] of Object.entries(reply.content ?? {})) {
      // A stream of events has no schema
      const shown = schema ? [`${type}: `, ...words(schema)] : [type];
      content.push(element('p', ...shown));
    }
  }
  const summary = element('span', told.summary);
  summary.className = 'soft';
  return fold([element('code', `${method.toUpperCase()} ${path}`), summary], ...content);
}

function openTarget() {
  const target = document.getElementById(location.hash.slice(1));
  if (target?.tagName !== 'DETAILS') return;
  target.open = true;
  target.scrollIntoView();
}

try {
  const reply = await fetch('openapi.json');
  if (!reply.ok) throw new Error(`the server answered ${reply.status}`);
  const { info, paths, components } = await reply.json();
  main.append(element('p', `${info.title} ${info.version}. ${info.description}`));
  main.append(element('h2', 'Routes'));
  for (const [path, methods] of Object.entries(paths)) {
    for (const [method, told] of Object.entries(methods)) main.append(operation(method, path, told));
  }
  main.append(element('h2', 'Schemas'), element('p', 'A star marks required members.'));
  for (const [name, schema] of Object.entries(components.schemas)) {
    const made = fold([element('code', name)], ...shape(schema));
    made.id = name;
    main.append(made);
  }
  addEventListener('hashchange', openTarget);
  openTarget();
} catch (error) {
  main.append(element('p', `openapi.json could not be read: ${error.message}`));
}
