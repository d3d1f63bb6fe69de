//! How a report came about: date, machine, model, larder's commit, and the command line.

use std::ffi::OsStr;
use std::path::Path;
use std::time::SystemTime;

use anyhow::Result;
use larder_core::{NumberFormat, printable, rfc3339};
use larder_lab::{Fact, ReportOrigin};
use larder_runtime::OpenModel;

use crate::{TYPED, doctor, print};

/// Characters of a date and time without seconds.
const MINUTE: usize = "2026-11-25T12:34".len();

/// The origin of a report that this process makes now, with `threads` (default: one for each processor) and a store or
/// trace on some drive.
pub fn report_origin(threads: Option<usize>, drive: Option<&Path>) -> ReportOrigin {
    let date = rfc3339(SystemTime::now());
    let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let mut machine = doctor::machine(drive);
    machine.insert(1.min(machine.len()), Fact::new("Threads", threads.to_string()));
    ReportOrigin {
        date: format!("{} UTC", date[..MINUTE].replace('T', " ")),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        commit: option_env!("LARDER_BUILD_COMMIT").map(str::to_owned),
        command: command_line(TYPED.get().into_iter().flatten().skip(1)),
        machine,
        model: Vec::new(),
    }
}

/// The same for a report about one model.
pub fn model_origin(threads: usize, model: &OpenModel, path: &Path) -> Result<ReportOrigin> {
    Ok(ReportOrigin { model: model_facts(model, path)?, ..report_origin(Some(threads), Some(path)) })
}

/// Name, architecture, number formats and size of a model.
pub fn model_facts(model: &OpenModel, path: &Path) -> Result<Vec<Fact>> {
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let geometry = &model.blueprint.geometry;
    let architecture = format!(
        "{}: {} layers, {} with experts, {} of {} experts per token",
        model.blueprint.model_type,
        geometry.layers,
        geometry.moe_layers.len(),
        geometry.top_k,
        geometry.experts
    );
    let (resident, layers) = model.product_bytes()?;
    let names = |kinds: &mut dyn Iterator<Item = &(NumberFormat, u64)>| {
        let mut names: Vec<&str> = kinds.map(|(kind, _)| kind.name()).collect();
        names.sort_unstable();
        names.dedup();
        names.join(", ")
    };
    let formats = format!("experts {}; resident {}", names(&mut layers.iter().flatten()), names(&mut resident.iter()));
    let (resident, experts) = model.bytes()?;
    let size = format!(
        "{}: experts {}, resident {}",
        print::bytes(resident + experts),
        print::bytes(experts),
        print::bytes(resident)
    );
    Ok(vec![
        Fact::new("Model", printable(&name)),
        Fact::new("Architecture", printable(&architecture)),
        Fact::new("Number formats", formats),
        Fact::new("Size", size),
    ])
}

/// The command line as one would type it; what moves a cursor is escaped.
fn command_line(args: impl Iterator<Item = impl AsRef<OsStr>>) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./=:,+@%~".contains(c);
    let quoted = |arg: &OsStr| {
        let arg = printable(&arg.to_string_lossy());
        if !arg.is_empty() && arg.chars().all(plain) { arg } else { format!("'{}'", arg.replace('\'', "'\\''")) }
    };
    std::iter::once("larder".to_owned()).chain(args.map(|arg| quoted(arg.as_ref()))).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_can_be_typed_again() {
        let line = command_line(["report", "my store=4", "it's", "", "a\nb", "prior:lambda=0.2,j=1"].iter());
        assert_eq!(line, r"larder report 'my store=4' 'it'\''s' '' 'a\nb' prior:lambda=0.2,j=1");
    }

    #[test]
    fn an_origin_has_date_version_and_threads() {
        let made = report_origin(Some(3), Some(Path::new(".")));
        assert!(made.date.len() == MINUTE + " UTC".len() && made.date.starts_with("20"), "{}", made.date);
        assert_eq!(made.version, env!("CARGO_PKG_VERSION"));
        assert!(made.machine.iter().any(|fact| fact.name == "Threads" && fact.value == "3"));
    }
}
