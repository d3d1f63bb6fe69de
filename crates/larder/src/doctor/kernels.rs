//! The finding about kernels: the instruction set that is used, and why others are not.

use larder_kernels::{SetUse, instruction_sets};
use serde_json::{Value, json};

use super::Finding;

pub fn check() -> Finding {
    of_sets(&instruction_sets())
}

/// Of all instruction sets of the architecture by name, the best first.
fn of_sets(sets: &[(&str, SetUse)]) -> Finding {
    let used = sets.iter().find(|(_, of)| *of == SetUse::Used).map_or("none", |(name, _)| *name);
    let unused = sets.iter().filter_map(|(name, of)| Some(format!("; {name}: {}", why_unused(of, used)?)));
    let rows: Vec<Value> =
        sets.iter().map(|(name, of)| json!({"name": name, "unused": why_unused(of, used)})).collect();
    let finding =
        Finding::new("kernels", format!("{used}{}", unused.collect::<String>()), json!({"used": used, "sets": rows}));
    let others = |wanted: fn(&SetUse) -> bool| sets.iter().any(|(_, of)| wanted(of));
    if others(|of| *of == SetUse::Faster) {
        let fix = "leave out `kernels`: in larder.toml, LARDER_KERNELS in the environment, or -o kernels";
        return finding.advise_if(true, format!("{used} was chosen by name, and this CPU has faster kernels"), fix);
    }
    finding.advise_if(
        !others(|of| *of == SetUse::Slower),
        "larder has no SIMD kernels for this CPU, so products take several times as long",
        "in a virtual machine, pass the host's CPU through (qemu: -cpu host)",
    )
}

/// Why an instruction set is not used; `None` for the one that is.
fn why_unused(of: &SetUse, used: &str) -> Option<String> {
    match of {
        SetUse::Used => None,
        SetUse::Slower => Some(format!("{used} is faster")),
        SetUse::Faster => Some(format!("{used} was chosen by name")),
        SetUse::Missing(features) => Some(format!("this processor has no {}", features.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacking() -> (&'static str, SetUse) {
        ("avx512", SetUse::Missing(vec!["avx512f", "avx512vnni"]))
    }

    #[test]
    fn sets_that_are_not_used_say_why() {
        let good = of_sets(&[lacking(), ("avx2", SetUse::Used), ("portable", SetUse::Slower)]);
        assert_eq!(good.found, "avx2; avx512: this processor has no avx512f, avx512vnni; portable: avx2 is faster");
        assert!(good.advice.is_none() && good.numbers["used"] == "avx2", "{}", good.numbers);
        assert_eq!(good.numbers["sets"][1], json!({"name": "avx2", "unused": null}));
        assert_eq!(good.numbers["sets"][2], json!({"name": "portable", "unused": "avx2 is faster"}));
    }

    #[test]
    fn slow_kernels_have_the_remedy_for_their_cause() {
        let chosen = of_sets(&[lacking(), ("avx2", SetUse::Faster), ("portable", SetUse::Used)]);
        assert!(chosen.found.ends_with("; avx2: portable was chosen by name"), "{}", chosen.found);
        assert!(chosen.advice.unwrap().fix.contains("LARDER_KERNELS"));
        let alone = of_sets(&[lacking(), ("portable", SetUse::Used)]);
        assert!(alone.advice.unwrap().fix.contains("-cpu host"));
    }
}
