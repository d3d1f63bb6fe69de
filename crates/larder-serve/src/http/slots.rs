//! The slots, as llama.cpp's server has them: a list, and save, restore and erase of one.

use axum::extract::{Path, Request, State};
use tokio::sync::oneshot;

use super::body;
use crate::error::{ApiError, Json, Result};
use crate::queue::EngineCommand;
use crate::request;
use crate::sequences::sessions::check_name;
use crate::sequences::slots::{SlotAction, SlotCommand};
use crate::state::App;

/// All slots.
pub async fn list(State(app): State<App>) -> Result<Json> {
    let (to, slots) = oneshot::channel();
    app.queue.command(EngineCommand::ListSlots(to))?;
    slots.await.map(Json).map_err(|_| ApiError::shutting_down())
}

/// Does with a slot what the query says.
pub async fn act(State(app): State<App>, Path(id): Path<String>, request: Request) -> Result<Json> {
    let invalid = |message: String| ApiError::invalid_field("id_slot", "invalid_value", message);
    let id = id.parse().map_err(|_| invalid("The number of a slot must be an integer from 0 on.".into()))?;
    let action = action_of(request.uri().query().unwrap_or_default()).to_owned();
    let body = body::read(&app.server, request).await?;
    let action = parse(&action, &body)?;
    let (to, done) = oneshot::channel();
    app.queue.command(EngineCommand::Slot(SlotCommand { id, action, to }))?;
    done.await.map_err(|_| ApiError::shutting_down())?.map(Json)
}

/// The value of `action` in a query.
fn action_of(query: &str) -> &str {
    query.split('&').find_map(|pair| pair.strip_prefix("action=")).unwrap_or_default()
}

fn parse(action: &str, body: &[u8]) -> Result<SlotAction> {
    let name = || {
        let name = request::slot_file(body)?;
        let wrong = |error| ApiError::invalid_field("filename", "invalid_value", format!("{error}."));
        check_name(&name).map_err(wrong).map(|()| name)
    };
    match action {
        "save" => Ok(SlotAction::Save(name()?)),
        "restore" => Ok(SlotAction::Restore(name()?)),
        "erase" => Ok(SlotAction::Erase),
        _ => {
            let message = "The query must be action=save, action=restore or action=erase.";
            Err(ApiError::invalid_field("action", "invalid_value", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_parsed_or_refused() {
        assert_eq!(action_of("a=b&action=save&c"), "save");
        let file = br#"{"filename": "chat.bin"}"#;
        assert!(matches!(parse("save", file), Ok(SlotAction::Save(name)) if name == "chat.bin"));
        assert!(matches!(parse("restore", file), Ok(SlotAction::Restore(_))));
        assert!(matches!(parse("erase", b""), Ok(SlotAction::Erase)));
        for (action, body) in [
            ("", &file[..]),
            ("load", file),
            ("save", b""),
            ("save", b"[]"),
            ("save", b"{}"),
            ("save", br#"{"filename": 7}"#),
            ("restore", br#"{"filename": "../chat.bin"}"#),
        ] {
            assert_eq!(parse(action, body).err().map(|error| error.status.as_u16()), Some(400), "{action}");
        }
    }
}
