//! Fields that say what happens when the context is full.

use larder_text::ContextFull;

use super::fields::Fields;
use super::table::{Field, Kind, field};

const NAMES: [&str; 3] = [ContextFull::Stop.name(), ContextFull::DropTurns.name(), ContextFull::Shift.name()];

/// The field of all APIs.
pub const CONTEXT_FULL: Field = field("context_full", Kind::Choice(&NAMES), "what happens when the context is full");

/// OpenAI's field of Responses, which precedes the other.
pub const TRUNCATION: Field = field(
    "truncation",
    Kind::Choice(&["auto", "disabled"]),
    "`auto` leaves out the oldest turns; precedes `context_full`",
);

/// What happens when the context is full, if the request says it.
pub fn context_full(fields: &Fields) -> Option<ContextFull> {
    fields.string("context_full")?.parse().ok()
}

/// The same of Responses.
pub fn truncation(fields: &Fields) -> Option<ContextFull> {
    match fields.string("truncation") {
        None => context_full(fields),
        Some("auto") => Some(ContextFull::DropTurns),
        Some(_) => Some(ContextFull::Stop),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::request::table::Object;

    static BOTH: Object = Object { name: "Both", groups: &[&[CONTEXT_FULL, TRUNCATION]] };

    fn read(body: Value, read: impl Fn(&Fields) -> Option<ContextFull>) -> Result<Option<ContextFull>, Option<String>> {
        Fields::of(&body, "", &BOTH).map(|fields| read(&fields)).map_err(|error| error.param)
    }

    #[test]
    fn choices_are_read_or_refused_by_name() {
        assert_eq!(read(json!({}), context_full), Ok(None));
        for full in ContextFull::ALL {
            assert_eq!(read(json!({"context_full": full.name()}), context_full), Ok(Some(full)));
        }
        assert_eq!(read(json!({"context_full": "x"}), context_full), Err(Some("context_full".into())));
        assert_eq!(
            read(json!({"truncation": "auto", "context_full": "stop"}), truncation),
            Ok(Some(ContextFull::DropTurns))
        );
        assert_eq!(read(json!({"truncation": "disabled"}), truncation), Ok(Some(ContextFull::Stop)));
        assert_eq!(read(json!({"context_full": "shift"}), truncation), Ok(Some(ContextFull::Shift)));
        assert_eq!(read(json!({"truncation": "some"}), truncation), Err(Some("truncation".into())));
    }
}
