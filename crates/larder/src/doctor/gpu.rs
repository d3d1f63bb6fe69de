//! Findings about NVIDIA GPUs: their links, displays, and with the feature `cuda` what the first one can do.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::Finding;
use super::sysfs::{folders, read_word};

/// The number of NVIDIA as a vendor of PCI devices.
const NVIDIA: &str = "0x10de";
/// The class of PCI devices that draw or compute.
const GRAPHICS: &str = "0x03";

pub fn check() -> Vec<Finding> {
    let mut findings = check_in(Path::new("/sys"), Path::new("/proc"));
    if !findings.is_empty() {
        findings.push(support());
    }
    findings
}

/// One finding for each card that the system lists.
fn check_in(sys: &Path, proc: &Path) -> Vec<Finding> {
    let devices = folders(&sys.join("bus/pci/devices"));
    devices
        .iter()
        .filter(|device| is_card(device))
        .flat_map(|device| [link(device, proc), display(device, proc)])
        .flatten()
        .collect()
}

fn is_card(device: &Path) -> bool {
    let starts = |name: &str, with: &str| read_word(device, name).is_some_and(|word| word.starts_with(with));
    starts("vendor", NVIDIA) && starts("class", GRAPHICS)
}

/// The name by which the driver knows a card, or its address.
fn name(device: &Path, proc: &Path) -> String {
    let address = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let about = fs::read_to_string(proc.join("driver/nvidia/gpus").join(&address).join("information"));
    let model =
        about.ok().and_then(|text| Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_owned()));
    model.unwrap_or_else(|| format!("NVIDIA GPU {address}"))
}

/// The link of a card. Its rate is lowered while the card idles, so only the number of lanes tells whether it is a
/// short one.
fn link(device: &Path, proc: &Path) -> Option<Finding> {
    let lanes = |name: &str| read_word(device, name)?.parse::<u32>().ok().filter(|lanes| *lanes > 0);
    let (used, most) = (lanes("current_link_width")?, lanes("max_link_width")?);
    let (name, rate) = (name(device, proc), read_word(device, "max_link_speed").unwrap_or_default());
    let found = match rate.as_str() {
        "" => format!("{name}, {used} of {most} PCIe lanes"),
        rate => format!("{name}, {used} of {most} PCIe lanes of up to {rate}"),
    };
    let numbers = json!({"name": name, "lanes": used, "lanes_of_card": most, "rate": rate});
    Some(Finding::new("GPU", found, numbers).advise_if(
        used < most,
        format!("with {used} of its {most} lanes, copies of experts to the GPU take {} times as long", most / used),
        "put the card into a slot with more lanes, and free lanes that another card or SSD shares; in most laptops this cannot be changed",
    ))
}

/// A display that is connected to a card.
fn display(device: &Path, proc: &Path) -> Option<Finding> {
    let connectors = folders(&device.join("drm")).into_iter().flat_map(|card| folders(&card));
    let is_connected = |connector: &PathBuf| read_word(connector, "status").as_deref() == Some("connected");
    let connector = connectors.into_iter().find(is_connected)?;
    let connector = connector.file_name()?.to_string_lossy().into_owned();
    let numbers = json!({"connector": connector});
    let found = format!("a display is connected to {} ({connector})", name(device, proc));
    Some(Finding::new("display", found, numbers).advise_if(
        true,
        "a display and what is drawn on it take some hundred MB of the GPU's memory, and time",
        "connect the display to the processor's graphics if it has one",
    ))
}

/// Whether this build can use a GPU, and what the first one can do.
fn support() -> Finding {
    const ID: &str = "CUDA";
    match larder_runtime::gpu::inspect() {
        None => Finding::new(ID, "this larder was built without CUDA", json!({"built_in": false})).advise_if(
            true,
            "the GPU is not used",
            "build larder with the feature `cuda` (see docs/cuda.md), and add --device cuda",
        ),
        Some(Err(error)) => Finding::new(ID, "the GPU cannot be used", json!({"built_in": true})).advise_if(
            true,
            format!("{error:#}"),
            "install NVIDIA's driver and NVRTC: see docs/cuda.md",
        ),
        Some(Ok(gpu)) => {
            let free = crate::print::bytes(gpu.free);
            let rate = |seconds: f64| crate::print::bytes(seconds as u64);
            let (to, from, vram) = (gpu.throughput.link_in, gpu.throughput.link_out, gpu.throughput.vram);
            let found = format!(
                "{}, {free} free, copies {}/s to it and {}/s back, VRAM {}/s",
                gpu.name,
                rate(to),
                rate(from),
                rate(vram)
            );
            let numbers = json!({
                "built_in": true,
                "free_bytes": gpu.free,
                "bytes_per_second_in": to,
                "bytes_per_second_out": from,
                "bytes_per_second_vram": vram,
                "page_locking": gpu.page_locking,
            });
            Finding::new(ID, found, numbers).advise_if(
                !gpu.page_locking,
                "the driver locks no pages of memory, so copies of experts go through small buffers, at a part of the link's rate",
                "allow it: in a container with its limit on locked memory (`--ulimit memlock=-1`); in a virtual machine by the host",
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::sysfs::tests::tree;

    #[test]
    fn a_short_link_and_a_display_give_advice() {
        let card = |file: &str| format!("sys/bus/pci/devices/0000:01:00.0/{file}");
        let root = tree(&[
            (&card("vendor"), "0x10de\n"),
            (&card("class"), "0x030000\n"),
            (&card("current_link_width"), "4\n"),
            (&card("max_link_width"), "16\n"),
            (&card("max_link_speed"), "16.0 GT/s PCIe\n"),
            (&card("drm/card1/card1-DP-1/status"), "disconnected\n"),
            (&card("drm/card1/card1-HDMI-A-1/status"), "connected\n"),
            ("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA GeForce RTX 4070\nIRQ: 5\n"),
            // Its own sound device, and graphics of another vendor.
            ("sys/bus/pci/devices/0000:01:00.1/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:01:00.1/class", "0x040300\n"),
            ("sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n"),
            ("sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n"),
        ]);
        let all = check_in(&root.path().join("sys"), &root.path().join("proc"));
        let found: Vec<&str> = all.iter().map(|finding| &finding.found[..]).collect();
        assert_eq!(
            found,
            [
                "NVIDIA GeForce RTX 4070, 4 of 16 PCIe lanes of up to 16.0 GT/s PCIe",
                "a display is connected to NVIDIA GeForce RTX 4070 (card1-HDMI-A-1)"
            ]
        );
        let means = &all[0].advice.as_ref().unwrap().means;
        assert_eq!(means, "with 4 of its 16 lanes, copies of experts to the GPU take 4 times as long");
        assert_eq!((&all[0].numbers["lanes"], &all[0].numbers["lanes_of_card"]), (&4.into(), &16.into()));
    }

    #[test]
    fn a_card_with_all_its_lanes_is_good_and_a_machine_without_one_has_no_findings() {
        let root = tree(&[
            ("sys/bus/pci/devices/0000:21:00.0/vendor", "0x10de\n"),
            ("sys/bus/pci/devices/0000:21:00.0/class", "0x030200\n"),
            ("sys/bus/pci/devices/0000:21:00.0/current_link_width", "16\n"),
            ("sys/bus/pci/devices/0000:21:00.0/max_link_width", "16\n"),
        ]);
        let all = check_in(&root.path().join("sys"), &root.path().join("proc"));
        assert_eq!(all.len(), 1);
        assert!(all[0].advice.is_none() && all[0].found == "NVIDIA GPU 0000:21:00.0, 16 of 16 PCIe lanes");
        assert!(check_in(&root.path().join("absent"), &root.path().join("proc")).is_empty());
    }
}
