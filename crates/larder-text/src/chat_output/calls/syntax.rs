//! The syntaxes of calls.

/// What is between the marks of a call.
#[derive(Clone, Copy, Debug)]
pub enum CallSyntax {
    /// An object with the name and the arguments under these keys: `{"name": "f", "arguments": {…}}`.
    NamedJson {
        /// Key of the arguments.
        arguments: &'static str,
        /// Whether such an object may be the whole answer, without any mark.
        may_be_bare: bool,
    },
    /// The name, a mark, and the arguments as a JSON object.
    Json {
        /// Between the name and the arguments.
        name_end: &'static str,
        /// What stands before `name_end`.
        head: CallHead,
    },
    /// The name, then each argument between marks: strings as they are, other values as JSON.
    Parameters {
        /// Behind the name.
        name_end: &'static str,
        /// Around the name of an argument.
        key: (&'static str, &'static str),
        /// Around its value.
        value: (&'static str, &'static str),
        /// Whether the name has an attribute that tells strings: `name="key" string="true"`.
        has_type: bool,
    },
    /// `name{key:<|"|>text<|"|>,other:1}`.
    Gemma,
    /// A list of Python's calls: `[name(key="text", other=1)]`.
    Python,
}

/// The name of a call, with an id or a number where the format has one.
#[derive(Clone, Copy, Debug)]
pub enum CallHead {
    /// The name alone.
    Name,
    /// The name, this mark, and an id, both of which may be missing.
    NameThenId(&'static str),
    /// An id, this mark, and the name.
    IdThenName(&'static str),
    /// This prefix, the name, a colon, and the number of the call; all together are the id.
    Numbered {
        /// Before the name.
        prefix: &'static str,
    },
}

impl CallHead {
    /// The mark within a head; empty if it has none.
    pub fn mark(self) -> &'static str {
        match self {
            CallHead::Name | CallHead::Numbered { .. } => "",
            CallHead::NameThenId(mark) | CallHead::IdThenName(mark) => mark,
        }
    }

    /// The name in `head`, and the id if there is one.
    pub(super) fn name_and_id(self, head: &str) -> (&str, Option<&str>) {
        match self {
            CallHead::Name => (head, None),
            CallHead::NameThenId(mark) => {
                head.split_once(mark).map_or((head, None), |(name, id)| (name.trim(), Some(id.trim())))
            }
            CallHead::IdThenName(mark) => {
                head.split_once(mark).map_or((head, None), |(id, name)| (name.trim(), Some(id.trim())))
            }
            CallHead::Numbered { prefix } => {
                let name = head.strip_prefix(prefix).unwrap_or(head);
                (name.rsplit_once(':').map_or(name, |(name, _)| name), Some(head))
            }
        }
    }
}
